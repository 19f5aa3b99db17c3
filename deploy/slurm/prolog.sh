#!/bin/bash
# Part of Slurm's Prolog (slurm.conf: Prolog=/etc/slurm/prolog.d/*), as root before a job: an MPS daemon for each GPU that
# the job got by gres/mps or gres/shard. mps-exporter finds them by itself.
#
# A job isn't started on a GPU whose MPS server is in FAULT: it would wait for clients of others to exit. Then this script
# fails, and Slurm drains the node and requeues the job.
set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin

# Set by Slurm for shared GPUs; nothing else needs MPS.
[ -n "${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-}${SLURM_SHARDS_ON_NODE:-}" ] || exit 0
gpus=${SLURM_JOB_GPUS:-${CUDA_VISIBLE_DEVICES:-}}

# Whether a daemon lives: it holds this lock. One that is asked may turn us away, as it does beside somebody else's session.
# Locks are listed by their real path, and /tmp may be a link.
has_daemon() { lslocks --notruncate --noheadings --output PATH | grep -qxF "$(realpath -m "$CUDA_MPS_PIPE_DIRECTORY")/control_lock"; }

# An exporter that is down must not stop jobs: without an answer go on.
metrics=$(curl --silent --fail --max-time 2 http://127.0.0.1:10055/metrics) || metrics=

for gpu in ${gpus//,/ }; do
  case $gpu in *[!0-9]* | '') continue ;; esac
  export CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps_$gpu CUDA_MPS_LOG_DIRECTORY=/tmp/nvidia-log_$gpu
  if grep -Eq "^mps_fault_start_timestamp_seconds\{.*gpu=\"$gpu\"" <<<"$metrics"; then
    echo "GPU $gpu: the MPS server is in FAULT; see http://$(hostname -s):10055/" >&2
    exit 1
  fi
  # One daemon for each GPU, and not two when two jobs start at once.
  exec 9>"/run/lock/nvidia-mps_$gpu"
  flock -w 20 9 || exit 1
  if ! has_daemon; then
    # What a daemon that was killed left behind would be in the way.
    rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    # The daemon must not inherit the lock.
    CUDA_VISIBLE_DEVICES=$gpu nvidia-cuda-mps-control -d 9>&- || exit 1
  fi
  # Who uses it: the last one's epilog ends the daemon. Clients don't count, for a job may not have started its own yet.
  mkdir -p "/run/mps-slurm/$gpu" && : >"/run/mps-slurm/$gpu/${SLURM_JOB_ID:?}" || exit 1
  exec 9>&-
done
exit 0
