"""The program of a SLURM job, the same for every job: shell that reads the assignments `slurm_job` writes above it.

`COMMON`, then `SERVER` where nodes serve vLLM, then `TRAINER`. docs/slurm.md says how the job behaves; the tests run it
whole, with stand-ins for srun, scontrol, torchrun and vllm.
"""

from rlkit.export.launch import FOREIGN
from rlkit.export.reading import GENERATED

HEAD = f"# {GENERATED}. Start it with sbatch; docs/slurm.md of rlkit says what it does."

INTRODUCTION = r"""
# All values that are not rlkit's own stand in the lines above and in the block below, quoted; the rest reads variables.
# shellcheck disable=SC1003,SC2016 # a $ or a backslash in a value is meant as it stands
set -euo pipefail
"""

COMMON = r"""
POLL=${RLKIT_JOB_POLL:-5}                    # seconds between two looks at the server and the trainer
SERVER_LIMIT=${RLKIT_JOB_SERVER_LIMIT:-1800} # seconds in which every server must answer
GRACE=${RLKIT_JOB_GRACE:-60}                 # seconds that a step has to end before it is killed

say() { printf 'rlkit job %s: %s\n' "${SLURM_JOB_ID:-?}" "$*" >&2; }
fail() {
  say "$*"
  exit 1
}

[[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ && -n ${SLURM_JOB_NODELIST:-} ]] \
  || fail "not inside a SLURM job; start this file with sbatch"
[[ $SERVER_LIMIT =~ ^[0-9]+$ && $GRACE =~ ^[0-9]+$ ]] \
  || fail "RLKIT_JOB_SERVER_LIMIT and RLKIT_JOB_GRACE are whole seconds"
[[ -f $SCRIPT ]] || fail "there is no $SCRIPT in $PWD; call sbatch where the script's path leads to it"

if [[ -n $SETUP ]]; then
  set +u # conda's and many modules' files read variables that are not set
  # shellcheck disable=SC1090
  source "$SETUP"
  set -u
fi

trainer='' server='' signal=''
alive() { [[ -n $1 ]] && kill -0 "$1" 2>/dev/null; }
join() { local IFS=,; printf '%s' "$*"; }

# SIGTERM to an srun ends its tasks at once, with SIGKILL: right for a server, never for a trainer that shall save.
end_step() {
  local since=$SECONDS
  alive "$1" || return 0
  kill -TERM "$1" 2>/dev/null || true
  while alive "$1"; do
    if ((SECONDS - since > GRACE)); then kill -KILL "$1" 2>/dev/null || true; fi
    sleep "$POLL"
  done
}

# USR1: the time limit is near. TERM: scancel, or a preemption. The loop below passes them on to the trainer.
trap 'signal=USR1; say "got SIGUSR1"' USR1
trap 'signal=TERM; say "got SIGTERM"' TERM
trap 'end_step "$trainer"; end_step "$server"' EXIT

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
mapfile -t nodes <<<"$hosts"
((${#nodes[@]} == TRAIN_NODES + VLLM_NODES)) \
  || fail "expected $TRAIN_NODES + $VLLM_NODES nodes, got ${#nodes[@]}: ${nodes[*]}"
train_nodes=("${nodes[@]:0:TRAIN_NODES}")

# The job's folder, the same after a requeue. rlkit does not write into a folder that holds anything but a run to go
# on from: it takes a name beside it, as it does for the second run of a script. So all of them lie inside one folder.
restarts=${SLURM_RESTART_COUNT:-0}
FOLDER=${RUN_FOLDER:-runs/$JOB_NAME-$SLURM_JOB_ID}
find_in_runs() { if [[ -d $FOLDER ]]; then find "$FOLDER" -mindepth 2 -maxdepth 2 "$@"; fi; }
find_in_runs -name STOPPED -delete
if [[ -z $RUN_FOLDER && $restarts != 0 ]]; then find_in_runs -name lock -delete; fi # of processes that have ended
for run in "$FOLDER"/run "$FOLDER"/run-*; do
  [[ -d $run && -n $(ls -A -- "$run") && ! -e $run/ckpt/latest ]] || continue
  [[ $restarts != 0 ]] || fail "$run holds something, but no checkpoint to go on from; choose another folder"
  say "$run has no checkpoint; it is kept as $run.before-restart-$restarts"
  mv -T -- "$run" "$run.before-restart-$restarts"
done
script_flags=(--out "$FOLDER/run" --resume auto)
"""

SERVER = r"""
serve_nodes=("${nodes[@]:TRAIN_NODES}")
port=${VLLM_PORT:-$((10000 + SLURM_JOB_ID % 10000))}
command -v curl >/dev/null || fail "curl is missing; the job asks the servers for their health with it"

show_server_logs() { tail -n 20 -- "vllm-$SLURM_JOB_ID-"*.out >&2 || true; }
server_fail() {
  show_server_logs
  fail "$* Their logs: vllm-$SLURM_JOB_ID-*.out in $PWD"
}
healthy() { curl --silent --fail --noproxy '*' --max-time 5 --output /dev/null "http://$1:$port/health"; }

# What each serving node runs. SLURM sends SIGTERM to every task at a preemption, and the trainer still needs the server
# for the step that it finishes: this shell is the task, and lets the signal pass. The job ends the server itself.
server_task=$(
  cat <<'TASK'
trap : TERM USR1
unset @FOREIGN@ "${!TORCHELASTIC_@}"
vllm serve "$@"
exit $?
TASK
)
for node in "${serve_nodes[@]}"; do # else a stranger's server would be taken for ours
  ! healthy "$node" || fail "port $port of $node answers already, for someone else; choose another one with --vllm-port"
done
# Each request to a server needs this secret. Both sruns pass it on in the environment, and no command line shows it.
VLLM_API_KEY=${VLLM_API_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
RLKIT_SERVE_HOSTS=$(join "${serve_nodes[@]}") # the names by which the trainer addresses them
export VLLM_API_KEY RLKIT_SERVE_HOSTS
say "starting vLLM on ${serve_nodes[*]}, port $port"
srun --nodes="$VLLM_NODES" --ntasks="$VLLM_NODES" --ntasks-per-node=1 --nodelist="$(join "${serve_nodes[@]}")" \
  --kill-on-bad-exit=1 --wait=10 --output=vllm-%j-%t.out --open-mode=append "${SRUN_ARGS[@]}" \
  env VLLM_SERVER_DEV_MODE=1 VLLM_USE_RUST_FRONTEND=0 bash -c "$server_task" server "$VLLM_MODEL" \
  --host 0.0.0.0 --port "$port" \
  --tensor-parallel-size "$VLLM_TP" --weight-transfer-config '{"backend":"nccl"}' \
  --logprobs-mode processed_logprobs --max-logprobs -1 --generation-config vllm \
  --worker-extension-cls rlkit.engines.worker.WeightLoader \
  --middleware rlkit.engines.vllm.guard.Guard "${VLLM_ARGS[@]}" &
server=$!

urls=() since=$SECONDS
for node in "${serve_nodes[@]}"; do
  urls+=("http://$node:$port")
  until healthy "$node"; do
    alive "$server" || server_fail "the vLLM servers ended before they answered."
    ((SECONDS - since < SERVER_LIMIT)) || server_fail "no answer from http://$node:$port/health after $SERVER_LIMIT s."
    [[ -z $signal ]] || fail "stopped by SIG$signal before the vLLM servers answered; nothing was trained"
    sleep "$POLL"
  done
done
alive "$server" || server_fail "the vLLM servers ended as soon as they had answered."
say "vLLM answers"
script_flags+=(--vllm-url "$(join "${urls[@]}")")
""".replace("@FOREIGN@", " ".join(FOREIGN))

TRAINER = r"""
# What each training node runs. torchrun dies of SIGUSR1 and leaves its workers behind, unless it is told to pass it on;
# and it must be the task itself, since SLURM signals only the task. Old versions cannot be told, so the shell
# stays and sends SIGTERM instead, and the workers have 30 s.
trainer_task=$(
  cat <<'TASK'
unset @FOREIGN@ "${!TORCHELASTIC_@}"
known=$(torchrun --help) || exit
wait_for=$1
shift
if [[ $known == *--shutdown-timeout* ]]; then set -- --shutdown-timeout "$wait_for" "$@"; fi
if [[ $known == *--signals-to-handle* ]]; then
  exec torchrun --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$@"
fi
torchrun "$@" &
child=$!
trap 'kill -TERM "$child"' USR1 TERM
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
wait "$child"
TASK
)
[[ -z $signal ]] || fail "stopped by SIG$signal before the training began"
say "training on ${train_nodes[*]}, in $FOLDER"
srun --nodes="$TRAIN_NODES" --ntasks="$TRAIN_NODES" --ntasks-per-node=1 --nodelist="$(join "${train_nodes[@]}")" \
  --kill-on-bad-exit=1 --wait=60 "${SRUN_ARGS[@]}" \
  bash -c "$trainer_task" trainer "$SHUTDOWN_SECONDS" \
  --nnodes="$TRAIN_NODES" --nproc-per-node="$PROCESSES_PER_NODE" --max-restarts=0 --rdzv-backend=c10d \
  --rdzv-endpoint="${train_nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))" --rdzv-id="$SLURM_JOB_ID" \
  "$SCRIPT" "${script_flags[@]}" "${SCRIPT_ARGS[@]}" &
trainer=$!

asked='' lost=''
ask_to_save() {
  if [[ -z $asked ]]; then kill -USR1 "$trainer" 2>/dev/null || true; fi
  asked=yes
}
while alive "$trainer"; do
  if [[ -n $signal ]]; then ask_to_save; fi
  if [[ -n $server && -z $lost ]] && ! alive "$server" && alive "$trainer"; then
    lost=$SECONDS
    show_server_logs
    say "the vLLM servers ended while the trainer runs; it has $GRACE s to save and end"
    ask_to_save
  fi
  if [[ -n $lost ]] && ((SECONDS - lost > GRACE)); then end_step "$trainer"; fi
  sleep "$POLL"
done
code=0
wait "$trainer" || code=$?
say "the trainer ended with code $code"
end_step "$server"

# STOPPED says that the run ended early with everything saved; torchrun's exit code does not tell.
stopped=$(find_in_runs -name STOPPED)
if [[ -n $lost ]]; then
  ((code)) || code=1 # saved or not, it is not done, and a server that dies would die again
elif [[ -n $stopped && $signal == TERM ]]; then
  say "stopped by SIGTERM, all saved; if SLURM does not requeue the job itself: scontrol requeue $SLURM_JOB_ID"
elif [[ -n $stopped ]]; then
  if scontrol requeue "$SLURM_JOB_ID"; then
    say "stopped early, all saved, requeued"
  else
    say "stopped early, all saved, but SLURM did not requeue the job; start it again with --run-folder $FOLDER"
    ((code)) || code=1
  fi
fi
exit "$code"
""".replace("@FOREIGN@", " ".join(FOREIGN))
