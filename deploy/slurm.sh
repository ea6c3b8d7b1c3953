#!/bin/bash
# One run on the nodes of a Slurm allocation, which are a Ray cluster for as long as it lasts. From a checkout:
#
#   sbatch deploy/slurm.sh --profile fsdp8 --model flux2-seed name=first
#   sbatch --nodes=2 deploy/slurm.sh --profile fsdp8 --model neox-20b name=second resources.num_workers=16
#
# Takes the options of `fluxray train`. FLUXRAY_HOME must name a folder that all nodes share; FLUXRAY_ENV the virtual environment
# with fluxray in it, by default .venv of the checkout. Slurm signals five minutes before the end, the run saves and stops; the
# same command with the same name= goes on.
#SBATCH --job-name=fluxray
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=fluxray-%j.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:-$PWD}"
# shellcheck source=/dev/null
source "${FLUXRAY_ENV:-.venv}/bin/activate"
export FLUXRAY_HOME=${FLUXRAY_HOME:?name a folder that all nodes share}

# A token for this job alone; it is in no file and on no command line.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

# Ray ends workers when the host's memory is 95% full; a streamed run lives near the limit.
export RAY_memory_usage_threshold=0.98 RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300

# This script runs on the allocation's first node, which becomes the head.
address=$(hostname --all-ip-addresses | awk '{print $1}'):$((20000 + SLURM_JOB_ID % 20000))
driver=$(mktemp)
trap 'rm -f "$driver"' EXIT
trap 'test ! -s "$driver" || kill -TERM "$(cat "$driver")"' TERM

# shellcheck disable=SC2016  # the inner shell expands $$, $0 and $@
srun --kill-on-bad-exit=1 ray symmetric-run \
    --address "$address" \
    --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-gpus "${SLURM_GPUS_ON_NODE:-0}" \
    --num-cpus "${SLURM_CPUS_PER_TASK:-1}" \
    --object-store-memory 2000000000 \
    --disable-usage-stats \
    -- bash -c 'echo $$ > "$0"; RAY_ADDRESS=$1 exec python jobs/train.py "${@:2}"' "$driver" "$address" "$@" &

# A signal interrupts `wait`; the last one returns how the run ended.
code=0
wait $! || code=$?
while kill -0 $! 2> /dev/null; do
    code=0
    wait $! || code=$?
done
if [ ! -s "$driver" ]; then
    echo "the nodes did not become a Ray cluster; the reason stands above" >&2
    exit 1
fi
exit "$code"
