# shellcheck shell=bash
# Shared by all run scripts, which source this file from the folder of the program: it turns the environment
# and the .toml of the run into options of the program. A mistake ends the script with one line.
#     RUN          gpt2_124M (the default), gpt2_350M, gpt2_774M, gpt2_1558M or gpt3_125M: a .toml beside this
#     CONFIG       another file of options; RUN is then its name without .toml, unless it is set. Its total-batch
#                  is a step's of all workers
#     TRAIN_DATA, VAL_DATA   token shards (default: the file's)
#     TOKENS       in a step of all workers, a multiple of all GPUs x BATCH x the length of a sequence
#                  (default: the file's)
#     BATCH        sequences that a GPU computes at once
#     OUT          folder for logs and checkpoints

PROGRAM=${PROGRAM:-./train_gpt} # ./train_gpt_cpu where there is no GPU; set OMP_NUM_THREADS then
name=${CONFIG:-gpt2_124M} name=${name##*/}
RUN=${RUN:-${name%.toml}}
CONFIG=${CONFIG:-scripts/$RUN.toml}

fail() {
    echo "error: $1" >&2
    exit 2
}

# The value of an option in CONFIG.
setting() {
    local line space='[[:space:]]*' value="(\"([^\"]*)\"|'([^']*)'|([^\"'#[:space:]]*))"
    while IFS= read -r line || [ -n "$line" ]; do
        if [[ $line =~ ^$space$1$space=$space$value$space(\#.*)?$ ]]; then
            echo "${BASH_REMATCH[2]}${BASH_REMATCH[3]}${BASH_REMATCH[4]}"
        fi
    done <"$CONFIG"
}

numbers() {
    local name least
    for name in "$@"; do
        least=1
        [ "$name" != RESTARTS ] || least=0
        [[ ${!name} =~ ^(0|[1-9][0-9]*)$ && ${!name} -ge $least ]] ||
            fail "$name is '${!name}': set it to a whole number of at least $least"
    done
}

command -v "$PROGRAM" >/dev/null || fail "there is no $PROGRAM: run make train_gpt, or set PROGRAM"
[ -f "$CONFIG" ] || fail "there is no $CONFIG: start this from the folder of the program, with a known RUN"
TRAIN_DATA=${TRAIN_DATA:-$(setting train-data)}
VAL_DATA=${VAL_DATA:-$(setting val-data)}
TOKENS=${TOKENS:-$(setting total-batch)}
BATCH=${BATCH:-$(setting batch)}
OUT=${OUT:-log/$RUN${out_suffix:-}} # a script may give each worker or job its own
numbers TOKENS BATCH
compgen -G "$TRAIN_DATA" >/dev/null || fail "no file matches $TRAIN_DATA: set TRAIN_DATA to your token shards"

# meet_at_redis: exports DILOCO_STORE, unless it is set: the server REDIS, with the password in PASSWORD_FILE. If
# it were an option of the program, other users of this machine could read the password.
meet_at_redis() {
    REDIS=${REDIS:-10.7.0.1:6379} PASSWORD_FILE=${PASSWORD_FILE:-${HOME:-}/.diloco-password}
    if [ -z "${DILOCO_STORE:-}" ]; then
        [ -s "$PASSWORD_FILE" ] || fail "no password in $PASSWORD_FILE: copy the Redis server's there"
        DILOCO_STORE=redis://:$(cat "$PASSWORD_FILE")@$REDIS
    fi
    export DILOCO_STORE
}

# is_elastic OPTION...: whether these, or else CONFIG, ask for elastic workers.
is_elastic() {
    local transport
    transport=$(setting outer-transport)
    while (($# > 0)); do
        case $1 in
            --outer-transport) transport=${2:-} ;;
            --outer-transport=*) transport=${1#*=} ;;
        esac
        shift
    done
    [ "$transport" = store ]
}

# warn_of LAUNCHER OPTION...: warns, if the run is elastic, that LAUNCHER ends all workers when one dies.
warn_of() {
    if is_elastic "${@:2}"; then
        echo "warning: $1 ends all workers when one dies, also with --outer-transport store: start each by" \
            "itself, with run_site.sh or run_slurm_site.sbatch" >&2
    fi
}

# train_by WORKERS RANKS: the options of the program
train_by() {
    training=(--config "$CONFIG" -i "$TRAIN_DATA" -j "$VAL_DATA" -o "$OUT"
        --workers "$1" --ranks "$2" -b "$BATCH" -d $((TOKENS / $1)))
}
