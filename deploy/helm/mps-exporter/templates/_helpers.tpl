{{- define "mps-exporter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "mps-exporter.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "mps-exporter.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "mps-exporter.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "mps-exporter.selectorLabels" -}}
app.kubernetes.io/name: {{ include "mps-exporter.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mps-exporter.labels" -}}
{{ include "mps-exporter.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "mps-exporter.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "mps-exporter.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/* The configuration file: what follows from other values, and over it `config`. */}}
{{- define "mps-exporter.config" -}}
{{- $ours := dict
  "kernel_log" (dict "enabled" .Values.kernelLog.enabled)
  "state" (dict "directory" (ternary "/var/lib/mps-exporter" "" (ne .Values.stateDirectory "")))
-}}
{{- if .Values.kubelet.enabled -}}
{{- $_ := set $ours "host" (dict "kubelet_socket" "/var/lib/kubelet/pod-resources/kubelet.sock") -}}
{{- end -}}
{{- if .Values.driver.hostPath -}}
{{- $_ := set $ours "nvml" (dict "library" "/usr/local/nvidia/lib64/libnvidia-ml.so.1") -}}
{{- end -}}
{{- toYaml (mergeOverwrite $ours (deepCopy .Values.config)) -}}
{{- end }}

{{- define "mps-exporter.probe" -}}
{{- if .root.Values.webConfigSecret -}}
exec:
  command: [/usr/bin/mps-exporter, healthcheck, "--web.listen-address=127.0.0.1:{{ .root.Values.port }}"]
{{- else -}}
httpGet: {path: {{ .path }}, port: metrics}
{{- end -}}
{{- end }}
