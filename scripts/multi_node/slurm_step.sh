# shellcheck shell=bash
# What the SLURM scripts share: the training as a step of this job, and what becomes of the job when it stops.
# SLURM signals the batch script and its srun together with the tasks, so this shell has to outlive a signal
# to see how the training ends.

is_ended=0  # SIGTERM came to this shell, too: SLURM ends the job, or puts it back into the queue by itself
status=127  # the training's
stopped=143 # that status: it was asked to stop, and has written a checkpoint
unmet=75    # that status: the other workers did not come within --timeout
mistake=2   # that status: it says what the user has to correct

# run_step PROGRAM ARGUMENT...: runs it in all tasks and waits for the last.
# --distribution=block: neighbours in number, the ranks of a worker, sit on the same node. No --gpus-per-task
# nor --gpu-bind: a task takes the GPU of its number on the node, and NCCL's fast paths need to see its
# peers' GPUs. srun does not take over --cpus-per-task by itself. When a task dies the others find out, say
# which, and end; if they do not, srun ends them a minute later (--wait): at once the message would be lost.
# --export=ALL: also where the job was submitted with --export=NONE.
run_step() {
    srun --export=ALL --distribution=block --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        --kill-on-bad-exit=0 --wait=60 "$@" &
    local srun=$! result is_interrupted=1
    trap 'is_interrupted=1; kill -USR1 $srun || true' USR1 # the time is nearly up; srun passes it on
    trap 'is_interrupted=1 is_ended=1' TERM
    while ((is_interrupted)); do
        is_interrupted=0 result=0
        wait $srun || result=$?
        ((result == 127)) || status=$result # 127: the signal came when it had been waited for
    done
    trap - USR1 TERM
}

# A task of an array by its number in it: one of them has the job's number of the whole array, by which SLURM
# would requeue them all.
requeue() {
    local job=$SLURM_JOB_ID
    [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    scontrol requeue "$job" || true # in salloc it says that it cannot
}

# A run that was asked to stop by its time limit, by a preemption with a time of grace or by another site goes
# back into the queue, from where it continues.
requeue_if_stopped() {
    if ((status == stopped && ! is_ended)); then requeue; fi
}

# Neither at its end, nor asked to stop, nor by a mistake that another start would only repeat.
has_failed() {
    ((status != 0 && status != stopped && status != mistake))
}

# requeue_at_most RESTARTS WHY: for what may well happen again. SLURM counts every start after the first, for
# whatever reason.
requeue_at_most() {
    local restarts=${SLURM_RESTART_COUNT:-0}
    if ((is_ended)); then return; fi
    if ((restarts < $1)); then
        echo "$2: the job requeues itself (restart $((restarts + 1)), the limit is RESTARTS=$1)" >&2
        requeue
    else
        echo "$2: after $restarts restarts (the limit is RESTARTS=$1) the job ends" >&2
    fi
}
