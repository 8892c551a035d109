# shellcheck shell=bash
# Shared by the SLURM scripts: runs the training as a step of this job, and requeues or ends the job when the
# training stops. SLURM signals the batch script and its srun together with the tasks, so this shell has to
# survive a signal to see how the training ends.

is_ended=0  # 1: this shell got SIGTERM, too: SLURM ends the job, or puts it back into the queue by itself
status=127  # exit status of the training
stopped=143 # status of a training that was asked to stop, and has written a checkpoint
unmet=75    # status after a temporary failure: others or the store did not answer, an earlier start still runs
mistake=2   # status after a mistake that the user has to correct
replaced=76 # status of an elastic worker whose place another process has taken

# The newest step of which this run has a whole checkpoint; an elastic worker's are in OUT/worker_W. WORKER: this
# job's only one, if set
newest_checkpoint() {
    # shellcheck disable=SC2086 # the * is for all workers
    { find "$OUT" "$OUT"/worker_${WORKER:-*} -maxdepth 1 -name 'DONE_????????' -printf '%f\n' 2>/dev/null ||
        true; } | sort | tail -n 1
}

# run_step PROGRAM ARGUMENT...: runs it in all tasks and waits for the last.
# --distribution=block:block: neighbours in number, the ranks of a worker, sit on the same node, and fill one
# socket after the other, as the numbers of GPUs do (SLURM's default would take sockets in turn, so that a task
# reached its GPU through the other socket). No --gpus-per-task nor --gpu-bind: a task takes the GPU of its
# number on the node, and NCCL's fast paths need to see the GPUs of its peers. srun does not inherit
# --cpus-per-task. When a task dies, the others notice, name it and end. If they do not, srun ends them a minute
# later (--wait); if it did so at once, their message would be lost.
# --export=ALL: also where the job was submitted with --export=NONE.
run_step() {
    began_after=$(newest_checkpoint)
    srun --export=ALL --distribution=block:block --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        --kill-on-bad-exit=0 --wait=60 "$@" &
    local srun=$! result is_interrupted=1
    trap 'is_interrupted=1; kill -USR1 $srun || true' USR1 # the time is nearly up; srun forwards the signal
    trap 'is_interrupted=1 is_ended=1' TERM
    while ((is_interrupted)); do
        is_interrupted=0 result=0
        wait $srun || result=$?
        ((result == 127)) || status=$result # 127: the signal came after srun's end
    done
    trap : USR1 # otherwise a late signal would end this shell before it can requeue the job
    trap - TERM
}

# Names a task of an array by its number in the array: one of the tasks has the whole array's job number, with
# which SLURM would requeue all of them.
requeue() {
    local job=$SLURM_JOB_ID
    [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    local tries=1 # in salloc it fails with a message
    [ "${ENVIRONMENT:-}" != BATCH ] || tries=12 # for three minutes: SLURM's controller may be away
    until scontrol requeue "$job" || ((--tries == 0)); do sleep 15; done
}

# A run that was stopped by its time limit, by a preemption with a grace time or by another site returns to the
# queue and continues from there. One that has not gained a step does so a few times: it may never gain one.
requeue_if_stopped() {
    if ((status != stopped || is_ended)); then return; fi
    if [ "$(newest_checkpoint)" = "$began_after" ]; then
        requeue_at_most "$RESTARTS" "the training was stopped before it gained a step"
    else
        requeue
    fi
}

# True if the run failed and another start may help: not after a mistake at the first start (at a later one it
# may be a folder or a GPU that is away), which another start would repeat, nor after another process took this
# worker's place, which another start would take back.
has_failed() {
    ((status != 0 && status != stopped && status != replaced)) &&
        ((status != mistake || ${SLURM_RESTART_COUNT:-0} > 0))
}

# requeue_at_most RESTARTS WHY: requeues after an end that may well happen again. OUT/restarts (of a site's worker
# OUT/restarts_W) has the number of such restarts at the newest checkpoint: a new checkpoint, or a new job, begins
# the count anew. Where it cannot be written, SLURM's count of all restarts is limited.
requeue_at_most() {
    local restarts=0 checkpoint='' newest kind='without progress' count="$OUT/restarts${WORKER:+_$WORKER}"
    if ((is_ended)); then return; fi
    newest=$(newest_checkpoint)
    ((${SLURM_RESTART_COUNT:-0} == 0)) || read -r restarts checkpoint 2>/dev/null <"$count" || true
    [ "$checkpoint" = "$newest" ] || restarts=0
    { mkdir -p "$OUT" && echo "$((restarts + 1)) $newest" >"$count.new" && mv "$count.new" "$count"; } 2>/dev/null ||
        { restarts=${SLURM_RESTART_COUNT:-0} kind='of any kind'; }
    if ((restarts < $1)); then
        echo "$2: the job requeues itself (restart $((restarts + 1)) $kind, the limit is RESTARTS=$1)" >&2
        requeue
    else
        echo "$2: after $restarts restarts $kind (the limit is RESTARTS=$1) the job ends" >&2
    fi
}
