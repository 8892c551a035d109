#!/usr/bin/env bash
# The Redis (or Valkey) server through which workers at different sites find each other. Run it at one of
# them, and copy the file with the password to the others:
#     (umask 077; openssl rand -hex 32 >~/.diloco-password)
#     ADDRESS=10.7.0.1 scripts/multi_node/redis_server.sh
# It stays in the foreground; Ctrl-C ends it. A run in lock-step uses it only when it begins and ends, so any
# machine will do. In an elastic run (--outer-transport store) all payloads go through it, so it should run
# where the link is best. Acknowledged data is on its disk and survives a crash, but nothing starts the server
# again: let systemd do it (Restart=always, and DATA on a disk that the run does not fill). Redis does not encrypt:
# ADDRESS is that of a WireGuard interface (README.md beside this script), or of a network that you trust.
set -euo pipefail

SERVER=${SERVER:-redis-server} # or valkey-server
ADDRESS=${ADDRESS:-127.0.0.1}
PORT=${PORT:-6379}
PASSWORD_FILE=${PASSWORD_FILE:-${HOME:-}/.diloco-password} # or the password itself in REDIS_PASSWORD
DATA=${DATA:-log/redis} # folder for what it keeps

fail() {
    echo "error: $1" >&2
    exit 2
}
[ "$DATA" != log/redis ] || [ -f scripts/training.sh ] ||
    fail "no scripts/training.sh: start this from the folder of the program, or set DATA"
command -v "$SERVER" >/dev/null || fail "there is no $SERVER: install it, or set SERVER"
password=${REDIS_PASSWORD:-$(cat "$PASSWORD_FILE" 2>/dev/null || true)}
[ -n "$password" ] || fail "no password in $PASSWORD_FILE: (umask 077; openssl rand -hex 32 >$PASSWORD_FILE)"
# An attacker can try a hundred thousand passwords a second. Letters and digits need no quoting in the store's
# address.
[[ $password =~ ^[[:alnum:]]{16,}$ ]] ||
    fail "the password is not 16 or more letters and digits: (umask 077; openssl rand -hex 32 >$PASSWORD_FILE)"
# Refuses 0, 0.0.0.0, ::, and Redis' own * and -::*, also in a list of addresses.
if [[ $ADDRESS =~ ^[0.:]*$|[[:space:]*] ]]; then
    fail "ADDRESS $ADDRESS means every network: give the address of one, such as WireGuard's"
fi

umask 077 # no other user may read what it keeps
mkdir -p "$DATA" 2>/dev/null || fail "the folder $DATA cannot be made: set DATA"
# The settings come through stdin: in arguments all users of this machine could read the password.
exec "$SERVER" - <<END
bind $ADDRESS
port $PORT
requirepass $password
dir "$DATA"
save ""
appendonly yes
appendfsync always
tcp-keepalive 60
END
