# shellcheck shell=bash
# Transaction-pooling pgbouncers of our own, each in .dev/pgbouncer/NAME. Sourced by ./dev.

pgbouncer_bin() { PATH=$PATH:/usr/sbin command -v pgbouncer; }

pgbouncer_url() {
    [ -s "$STATE/pgbouncer/$1/url" ] || die "there is no pgbouncer $1 here"
    cat "$STATE/pgbouncer/$1/url"
}

pgbouncer_start() { locked "pgbouncer-$1" pgbouncer_start_now "$@"; }

# NAME TARGET_URL
pgbouncer_start_now() {
    local name=$1 dir=$STATE/pgbouncer/$1 bin port
    [[ ${2:-} =~ ^postgres(ql)?://([^:@/]+):([^:@/]*)@([^:/@]+):([0-9]+)/([^?/]+)$ ]] ||
        die "pgbouncer start wants NAME postgres://USER:PASSWORD@HOST:PORT/DATABASE" 2
    local user=${BASH_REMATCH[2]} password=${BASH_REMATCH[3]} host=${BASH_REMATCH[4]} server_port=${BASH_REMATCH[5]}
    local database=${BASH_REMATCH[6]}
    if alive "$dir/pid"; then
        pgbouncer_url "$name"
        return
    fi
    bin=$(pgbouncer_bin) || die "pgbouncer is not installed: ./dev test"
    mkdir -p "$dir"
    port=$(port_file "$dir/port")
    echo "\"$user\" \"$password\"" >"$dir/users.txt"
    cat >"$dir/pgbouncer.ini" <<CONF
[databases]
* = host=$host port=$server_port
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = $port
unix_socket_dir =
auth_type = scram-sha-256
auth_file = $dir/users.txt
pool_mode = transaction
max_client_conn = 500
default_pool_size = 20
CONF
    own "$dir"
    daemon "$dir" "$dir/log" "$bin" "$dir/pgbouncer.ini"
    pid_save "$dir/pid" "$DAEMON" || die "pgbouncer did not start: $(<"$dir/log")"
    until port_listening "$port"; do
        alive "$dir/pid" || die "pgbouncer did not start: $(<"$dir/log")"
        sleep 0.02
    done
    echo "postgres://$user:$password@127.0.0.1:$port/$database" >"$dir/url"
    say "pgbouncer $name: port $port"
    pgbouncer_url "$name"
}

pgbouncer_stop() { stop_gently "$STATE/pgbouncer/$1/pid" INT 2; }

pgbouncer_rm() {
    local dir=$STATE/pgbouncer/$1
    [ -d "$dir" ] || return 0
    kill_tree "$dir/pid"
    ports_release "$dir/port"
    rm -rf "$dir" "$STATE/.lock-pgbouncer-$1"
}
