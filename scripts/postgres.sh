# shellcheck shell=bash
# PostgreSQL servers of our own, each in .dev/postgres/NAME. Sourced by ./dev.

PG_USER=postrider PG_PASSWORD=postrider PG_DATABASE=postrider

postgres_bin() {
    local bin
    [ -s "$STATE/postgres-bin" ] && bin=$(<"$STATE/postgres-bin") && [ -x "$bin/postgres" ] && echo "$bin"
}

postgres_url() {
    [ -s "$STATE/postgres/$1/port" ] || die "there is no PostgreSQL server $1 here"
    echo "postgres://$PG_USER:$PG_PASSWORD@127.0.0.1:$(<"$STATE/postgres/$1/port")/$PG_DATABASE"
}

postgres_start() { locked "postgres-$1" postgres_start_now "$@"; }

# NAME [-c key=value ...]: the settings stay until the next start that names some.
postgres_start_now() {
    local name=$1 dir=$STATE/postgres/$1 began=${EPOCHREALTIME/[.,]/}
    shift
    if alive "$dir/pid"; then
        say "PostgreSQL $name runs already"
        postgres_url "$name"
        return
    fi
    rm -f "$dir/pid"
    if [ $# -gt 0 ] || [ ! -e "$dir/settings" ]; then
        mkdir -p "$dir"
        postgres_settings "$@" >"$dir/settings.new"
    fi
    [ -e "$dir/data/PG_VERSION" ] || postgres_init "$name" "$dir"
    [ ! -e "$dir/settings.new" ] || mv "$dir/settings.new" "$dir/settings"
    port_file "$dir/port" >/dev/null
    on_exit_undo "kill_tree '$dir/pid'"
    postgres_launch "$dir" || { tail -n 30 "$dir/log" >&2; die "PostgreSQL $name did not start"; }
    # shellcheck disable=SC2034
    UNDO=()
    say "PostgreSQL $name: port $(<"$dir/port"), ready in $(((${EPOCHREALTIME/[.,]/} - began) / 1000)) ms"
    postgres_url "$name"
}

postgres_settings() {
    while [ $# -gt 0 ]; do
        [[ $1 == -c && ${2:-} == *=* ]] || die "postgres start NAME takes only -c key=value" 2
        [[ ${2%%=*} =~ ^[a-z_.]+$ ]] || die "not a setting: $2" 2
        printf "%s = '%s'\n" "${2%%=*}" "${2#*=}"
        shift 2
    done
}

postgres_init() {
    local name=$1 dir=$2 bin
    bin=$(postgres_bin)
    say "PostgreSQL $name: creating the data folder"
    rm -rf "$dir/data" "$dir/init" && mkdir -p "$dir/s"
    printf '%s' "$PG_PASSWORD" >"$dir/password"
    own "$dir"
    cd "$dir" || return
    ${AS[@]+"${AS[@]}"} "$bin/initdb" -D "$dir/init" -U "$PG_USER" --pwfile="$dir/password" --auth=scram-sha-256 \
        --encoding=UTF8 --locale=C.UTF-8 --no-sync >"$dir/initdb.log" 2>&1 || { cat "$dir/initdb.log" >&2; die "initdb failed"; }
    echo "CREATE DATABASE $PG_DATABASE" |
        ${AS[@]+"${AS[@]}"} "$bin/postgres" --single -D "$dir/init" postgres >>"$dir/initdb.log" 2>&1
    cat >>"$dir/init/postgresql.conf" <<CONF
listen_addresses = '127.0.0.1'
unix_socket_directories = '$dir/s'
wal_level = logical
max_replication_slots = 200
max_wal_senders = 200
max_connections = 500
max_slot_wal_keep_size = 16GB
include '../settings'
CONF
    mv "$dir/init" "$dir/data" # whole, or not there
    cd "$ROOT" || return
}

postgres_launch() {
    local dir=$1 bin
    bin=$(postgres_bin) || die "no PostgreSQL was chosen: ./dev up"
    own "$dir"
    # after a kill -9 the pid in there may be a zombie that nobody reaped, or someone else's by now
    local old=""
    if { read -r old <"$dir/data/postmaster.pid"; } 2>/dev/null && ! postgres_lives "$old"; then
        rm -f "$dir/data/postmaster.pid" "$dir"/s/.s.PGSQL.*
    fi
    daemon "$dir" "$dir/log" "$bin/postgres" -D "$dir/data" -p "$(<"$dir/port")"
    pid_save "$dir/pid" "$DAEMON" || return 1
    # line 8 of postmaster.pid is its state; a stale file names another pid
    local status="" line until=$((${EPOCHREALTIME/[.,]/} + 120000000))
    while [ "${EPOCHREALTIME/[.,]/}" -lt "$until" ]; do
        alive "$dir/pid" || return 1
        if { mapfile -t line <"$dir/data/postmaster.pid"; } 2>/dev/null && [ "${line[0]:-}" = "$DAEMON" ]; then
            status=${line[7]:-}
            case ${status%% *} in ready | standby) return 0 ;; esac
        fi
        sleep 0.02
    done
    return 1
}

postgres_lives() {
    process_stat "$1" && [ "$PROC_STATE" != Z ] && [ "$(cat "/proc/$1/comm" 2>/dev/null)" = postgres ]
}

postgres_stop() {
    local dir=$STATE/postgres/$1
    [ -d "$dir" ] || return 0
    ! alive "$dir/pid" || say "stopping PostgreSQL $1"
    stop_gently "$dir/pid" INT 10
}

postgres_kill9() { kill_tree "$STATE/postgres/$1/pid"; }
postgres_freeze() { signal_tree STOP "$STATE/postgres/$1/pid"; }
postgres_thaw() { signal_tree CONT "$STATE/postgres/$1/pid"; }

postgres_restart() {
    postgres_stop "$1"
    postgres_start "$1"
}

postgres_rm() {
    local dir=$STATE/postgres/$1
    [ -d "$dir" ] || return 0
    postgres_kill9 "$1"
    ports_release "$dir/port"
    rm -rf "$dir" "$STATE/.lock-postgres-$1"
}
