#!/bin/bash
# Part of Slurm's Epilog, as root after a job: ends the MPS daemon of each GPU that this job was the last to use.
set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin

users=/run/mps-slurm
for folder in "$users"/*/; do
  gpu=$(basename "$folder")
  exec 9>"/run/lock/nvidia-mps_$gpu"
  flock -w 20 9 || continue
  # Without a marker of this job the GPU is none of its business.
  if rm "$folder/${SLURM_JOB_ID:?}" 2>/dev/null && [ -z "$(ls -A "$folder")" ]; then
    export CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps_$gpu CUDA_MPS_LOG_DIRECTORY=/tmp/nvidia-log_$gpu
    # Beside somebody else's session the command is lost, with status 0 at times: so until the daemon takes its FIFO away. One
    # that doesn't answer is left to the operator.
    for _ in {1..15}; do
      [ -e "$CUDA_MPS_PIPE_DIRECTORY/log" ] || break
      echo "quit -t 10" | timeout 5 nvidia-cuda-mps-control >/dev/null 2>&1
      sleep 1
    done
  fi
  exec 9>&-
done
exit 0
