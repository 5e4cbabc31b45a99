# shellcheck shell=bash
# What every part of ./dev needs: progress, the state folder, ports, processes. Sourced, never run.

STARTED=${EPOCHREALTIME/[.,]/}

# One line a step, with the time since the command began. stdout stays free for what a program reads.
say() {
    local us=$((${EPOCHREALTIME/[.,]/} - STARTED))
    printf '[%4d.%ds] %s\n' $((us / 1000000)) $((us / 100000 % 10)) "$*" >&2
}

die() {
    printf 'dev: %s\n' "$1" >&2
    exit "${2:-1}"
}

# PostgreSQL refuses to run as root; as root, every server runs as `nobody`.
AS=()
if [ "$(id -u)" = 0 ]; then
    AS=(setpriv --reuid=nobody "--regid=$(id -gn nobody)" --clear-groups)
fi

# What an interrupted or failed command leaves half-done is undone here.
# shellcheck disable=SC2034 # emptied by those who filled it
UNDO=()
# shellcheck disable=SC2120,SC2119
on_exit_undo() { # COMMAND...: a subshell says it again, it inherits no traps
    UNDO=("$@")
    trap on_exit EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
}

on_exit() {
    local code=$? undo
    trap '' INT TERM HUP
    for undo in ${UNDO[@]+"${UNDO[@]}"}; do eval "$undo" || true; done
    exit "$code"
}

# Where everything is kept: .dev/, or where the servers' user cannot enter it (a checkout below /root) or its path
# is too long for a socket, a folder in /var/tmp that .dev points at.
state_init() {
    local link=$ROOT/.dev hash
    hash=$(printf '%s' "$ROOT" | sha256sum)
    local elsewhere=/var/tmp/postrider-dev-${hash:0:12}
    if [ -d "$link" ] && [ ! -L "$link" ]; then
        STATE=$link
    elif [ ${#link} -le 60 ] && (cd / && ${AS[@]+"${AS[@]}"} test -x "$ROOT"); then
        rm -f -- "$link"
        STATE=$link
    else
        STATE=$elsewhere
        [ "$(readlink -- "$link" || true)" = "$STATE" ] || ln -sfn -- "$STATE" "$link"
    fi
    umask 022 # the servers' user reads what we write
    mkdir -p -- "$STATE"/{ports,postgres,broker,pgbouncer}
    [ -O "$STATE" ] || [ "$(id -u)" = 0 ] || die "$STATE belongs to another user"
    on_exit_undo # nothing yet
}

run_cargo() {
    command -v cargo >/dev/null || PATH=$HOME/.cargo/bin:$PATH
    command -v cargo >/dev/null || die "cargo is missing: install Rust first"
    local sub=$1 locked=()
    shift
    [ -z "${CI:-}" ] || locked=(--locked)
    (cd "$ROOT" && cargo "$sub" ${locked[@]+"${locked[@]}"} "$@")
}

# ── locks ──────────────────────────────────────────────────────────────────────────────────────────────────────
# locked NAME COMMAND...: one at a time over all ./dev of this checkout. Daemons must close fd 9 (see daemon).
locked() {
    local file=$STATE/.lock-$1
    shift
    (
        flock 9
        "$@"
    ) 9>"$file"
}

# ── ports ──────────────────────────────────────────────────────────────────────────────────────────────────────
port_listening() {
    grep -qsE ":$(printf '%04X' "$1") [0-9A-F]+:0000 0A" /proc/net/tcp /proc/net/tcp6
}

# A port nobody listens on and nobody here remembers, below the range that outgoing connections use.
port_take() {
    local port
    while :; do
        port=$((21000 + RANDOM % 11000))
        if [ -e "$STATE/ports/$port" ] || port_listening "$port"; then continue; fi
        : >"$STATE/ports/$port"
        echo "$port"
        return
    done
}

# port_file FILE: the port remembered in FILE; another one when a stranger took it meanwhile.
port_file() {
    local port=""
    [ ! -s "$1" ] || port=$(<"$1")
    if [ -z "$port" ] || port_listening "$port"; then
        [ -z "$port" ] || rm -f "$STATE/ports/$port"
        port=$(locked ports port_take)
        echo "$port" >"$1"
    fi
    echo "$port"
}

ports_release() {
    local file
    for file in "$@"; do
        [ ! -s "$file" ] || rm -f "$STATE/ports/$(<"$file")"
    done
}

# ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────
# A pid file holds "pid start-time": a pid that was given to another process since is recognised as stale.
process_stat() { # PID: sets PROC_STATE and PROC_START (no subshell: this is asked in loops)
    local stat
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
    # shellcheck disable=SC2086
    set -- ${stat##*) }
    PROC_STATE=$1 PROC_START=${20}
}

pid_save() { # FILE PID
    process_stat "$2" || return 1
    echo "$2 $PROC_START" >"$1"
}

pid_of() {
    local pid start
    [ -s "$1" ] && read -r pid start <"$1" && echo "$pid"
}

alive() { # FILE
    local pid start
    [ -s "$1" ] && read -r pid start <"$1" || return 1
    process_stat "$pid" && [ "$PROC_START" = "$start" ] && [ "$PROC_STATE" != Z ]
}

process_state() {
    process_stat "$1" || PROC_STATE=X
    case $PROC_STATE in T | t) echo frozen ;; *) echo running ;; esac
}

# The process and all below it, parents first.
process_tree() {
    local -A children=()
    local stat fields pid queue=("$1")
    for stat in /proc/[0-9]*/stat; do
        { read -r fields <"$stat"; } 2>/dev/null || continue
        pid=${fields%% *}
        # shellcheck disable=SC2086
        set -- ${fields##*) }
        children[$2]+=" $pid"
    done
    while [ ${#queue[@]} -gt 0 ]; do
        pid=${queue[0]}
        echo "$pid"
        # shellcheck disable=SC2206
        queue=("${queue[@]:1}" ${children[$pid]:-})
    done
}

signal_tree() { # SIGNAL PIDFILE
    alive "$2" || return 0
    local pid
    # twice: a parent stopped in the first round forks no more
    for pid in $(process_tree "$(pid_of "$2")"); do kill "-$1" "$pid" 2>/dev/null || true; done
    for pid in $(process_tree "$(pid_of "$2")"); do kill "-$1" "$pid" 2>/dev/null || true; done
}

# wait_gone PIDFILE SECONDS
wait_gone() {
    local until=$((${EPOCHREALTIME/[.,]/} + $2 * 1000000))
    while alive "$1"; do
        [ "${EPOCHREALTIME/[.,]/}" -lt "$until" ] || return 1
        sleep 0.05
    done
}

# A background part of this very command, with all it began.
stop_job() {
    local pid
    for pid in $(process_tree "$1"); do kill -TERM "$pid" 2>/dev/null || true; done
    wait "$1" || true
}

# kill_tree PIDFILE: at once, everything below it too; returns when the process is gone.
kill_tree() {
    alive "$1" || return 0
    local pids pid
    pids=$(process_tree "$(pid_of "$1")")
    for pid in $pids; do kill -KILL "$pid" 2>/dev/null || true; done
    for pid in $pids; do
        while process_stat "$pid" && [ "$PROC_STATE" != Z ]; do sleep 0.02; done
    done
    rm -f "$1"
}

# stop_gently PIDFILE SIGNAL SECONDS: ask, wait, then kill.
stop_gently() {
    alive "$1" || { rm -f "$1"; return 0; }
    signal_tree CONT "$1"
    kill "-$2" "$(pid_of "$1")" 2>/dev/null || true
    wait_gone "$1" "$3" || kill_tree "$1"
    rm -f "$1"
}

# daemon DIR LOG COMMAND...: in a session of its own, from DIR, without our locks; sets DAEMON to its pid.
daemon() {
    local dir=$1 log=$2
    shift 2
    local from=$PWD
    cd "$dir" || return
    setsid ${AS[@]+"${AS[@]}"} "$@" >"$log" 2>&1 </dev/null 9>&- &
    DAEMON=$!
    disown "$DAEMON"
    cd "$from" || return
}

own() { # the servers' user owns these
    [ ${#AS[@]} = 0 ] || chown -R "nobody:$(id -gn nobody)" "$@"
}
