# shellcheck shell=bash
# RabbitMQ brokers of our own, each in .dev/broker/NAME. Sourced by ./dev.
# The server's scripts are called where the package keeps them: those in /usr/sbin insist on the system's service.

# broker_sbin [ROOT]: the machine's own, or that of a root we fetched, as its processes see it.
broker_sbin() {
    local sbin found=""
    for sbin in "${1:-}"/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin; do
        [ ! -x "$sbin/rabbitmq-server" ] || found=${sbin#"${1:-}"}
    done
    [ -n "$found" ] && echo "$found"
}

# The major version of the machine's own.
broker_major() {
    local sbin
    sbin=$(broker_sbin) && sbin=${sbin#*rabbitmq_server-} && echo "${sbin%%.*}"
}

# The version a broker was asked to have where the machine's own is another one; nothing otherwise.
broker_fetched() { cat "$STATE/broker/$1/fetched" 2>/dev/null || true; }

broker_url() {
    [ -s "$STATE/broker/$1/port" ] || die "there is no broker $1 here"
    echo "amqp://guest:guest@127.0.0.1:$(<"$STATE/broker/$1/port")/%2f"
}

broker_management() {
    [ -s "$STATE/broker/$1/port-management" ] || die "there is no broker $1 here"
    echo "http://guest:guest@127.0.0.1:$(<"$STATE/broker/$1/port-management")"
}

# The whole environment of a node; without these the scripts read the system's files. Sets SBIN, and in AS what goes
# before a command of that node.
broker_env() {
    local dir=$STATE/broker/$1 var root="" version
    version=$(broker_fetched "$1")
    if [ -n "$version" ]; then
        root=$(rabbitmq_root "$version")
        rabbitmq_in "$version"
        AS=("${RABBITMQ_IN[@]}" ${AS[@]+"${AS[@]}"})
    fi
    SBIN=$(broker_sbin "$root") || die "RabbitMQ is not installed: ./dev up"
    for var in "${!RABBITMQ_@}"; do unset "$var"; done
    export HOME=$dir LC_ALL=C.UTF-8 # .erlang.cookie is in HOME
    export RABBITMQ_NODENAME=$1@localhost
    export RABBITMQ_CONF_ENV_FILE=$dir/rabbitmq-env.conf RABBITMQ_CONFIG_FILE=$dir/rabbitmq.conf
    export RABBITMQ_ADVANCED_CONFIG_FILE=$dir/advanced.config RABBITMQ_ENABLED_PLUGINS_FILE=$dir/enabled_plugins
    export RABBITMQ_MNESIA_BASE=$dir/mnesia RABBITMQ_LOG_BASE=$dir/logs RABBITMQ_PID_FILE=$dir/rabbit.pid
    export RABBITMQ_GENERATED_CONFIG_DIR=$dir/generated RABBITMQ_SCHEMA_DIR=$dir/schema
    RABBITMQ_DIST_PORT=$(<"$dir/port-distribution") ERL_EPMD_PORT=$(<"$STATE/broker-epmd.port")
    export RABBITMQ_DIST_PORT ERL_EPMD_PORT ERL_EPMD_ADDRESS=127.0.0.1
    # "allow input" makes the script exec the node, so its pid is the one we know; -noinput takes the input away again
    export RABBITMQ_ALLOW_INPUT=1
    export RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS="-noinput -kernel inet_dist_use_interface {127,0,0,1}"
}

broker_start() { locked "broker-$1" broker_start_now "$@"; }

broker_start_now() {
    local name=$1 dir=$STATE/broker/$1 began=${EPOCHREALTIME/[.,]/}
    shift
    broker_options "$name" "$@"
    if alive "$dir/pid"; then
        [ "$(process_state "$(pid_of "$dir/pid")")" = running ] || die "RabbitMQ $name is frozen: ./dev broker thaw $name"
        broker_wait "$dir" || die "RabbitMQ $name runs but does not answer (more: $dir/logs/rabbit.log)"
        say "RabbitMQ $name runs already"
        broker_url "$name"
        return
    fi
    say "RabbitMQ $name: starting"
    rm -f "$dir/pid"
    mkdir -p "$dir"/{logs,mnesia,generated,schema}
    port_file "$dir/port" >/dev/null
    port_file "$dir/port-management" >/dev/null
    port_file "$dir/port-distribution" >/dev/null
    : >"$dir/rabbitmq-env.conf"
    echo '[rabbitmq_management].' >"$dir/enabled_plugins"
    cat >"$dir/rabbitmq.conf" <<CONF
listeners.tcp.1 = 127.0.0.1:$(<"$dir/port")
management.tcp.ip = 127.0.0.1
management.tcp.port = $(<"$dir/port-management")
loopback_users = none
vm_memory_high_watermark.absolute = 1GB
disk_free_limit.absolute = 50MB
log.file = $dir/logs/rabbit.log
log.console = false
CONF
    [ ! -e "$dir/asked.conf" ] || cat "$dir/asked.conf" >>"$dir/rabbitmq.conf"
    own "$dir"
    locked epmd epmd_start
    on_exit_undo "kill_tree '$dir/pid'"
    broker_launch "$name" || { tail -n 30 "$dir/out" >&2; die "RabbitMQ $name did not start (more: $dir/logs/rabbit.log)"; }
    # shellcheck disable=SC2034
    UNDO=()
    say "RabbitMQ $name: port $(<"$dir/port"), ready in $(((${EPOCHREALTIME/[.,]/} - began) / 1000)) ms"
    broker_url "$name"
}

# broker_options NAME [--version 3|4] [-c KEY=VALUE ...]: a broker that was started keeps what it was started with.
broker_options() {
    local name=$1 dir=$STATE/broker/$1 version=""
    shift
    [ $# = 0 ] || [ ! -e "$dir" ] || die "broker $name is there already, with what it was started with" 2
    while [ $# -gt 0 ]; do
        case $1 in
            --version) version=${2:?--version wants 3 or 4} && shift 2 ;;
            -c) mkdir -p "$dir" && echo "${2:?-c wants KEY=VALUE}" >>"$dir/asked.conf" && shift 2 ;;
            *) die "broker start takes a NAME, --version 3 or 4, and -c KEY=VALUE" 2 ;;
        esac
    done
    if [ -z "$version" ] || [ "$version" = "$(broker_major)" ]; then return; fi
    rabbitmq_install "$version"
    mkdir -p "$dir"
    echo "$version" >"$dir/fetched"
}

broker_launch() {
    local name=$1 dir=$STATE/broker/$1
    broker_env "$name"
    daemon "$dir" "$dir/out" "$SBIN/rabbitmq-server"
    pid_save "$dir/pid" "$DAEMON" || return 1
    broker_wait "$dir"
}

broker_wait() {
    local dir=$1 until=$((${EPOCHREALTIME/[.,]/} + 120000000))
    while [ "${EPOCHREALTIME/[.,]/}" -lt "$until" ]; do
        alive "$dir/pid" || return 1
        ! grep -qs 'completed with' "$dir/out" || ! broker_answers "$dir" || return 0
        sleep 0.1
    done
    return 1
}

# Ready is: AMQP is spoken, and the HTTP API lets guest in.
broker_answers() {
    local reply=""
    port_listening "$(<"$1/port")" && port_listening "$(<"$1/port-management")" || return 1
    {
        exec 7<>"/dev/tcp/127.0.0.1/$(<"$1/port-management")" &&
            printf 'GET /api/vhosts HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic Z3Vlc3Q6Z3Vlc3Q=\r\nConnection: close\r\n\r\n' >&7 &&
            read -r -t 2 -u 7 reply
        exec 7>&-
    } 2>/dev/null || return 1
    [[ $reply == "HTTP/1.1 200"* ]] || return 1
    {
        exec 7<>"/dev/tcp/127.0.0.1/$(<"$1/port")" && printf 'AMQP\x00\x00\x09\x01' >&7 && read -r -t 2 -N 1 -u 7 reply
        exec 7>&-
    } 2>/dev/null || return 1
    [ "$reply" = $'\x01' ]
}

broker_stop() {
    local dir=$STATE/broker/$1
    [ -d "$dir" ] || return 0
    ! alive "$dir/pid" || say "stopping RabbitMQ $1"
    stop_gently "$dir/pid" TERM 20
}

broker_kill9() { kill_tree "$STATE/broker/$1/pid"; }
broker_freeze() { signal_tree STOP "$STATE/broker/$1/pid"; }
broker_thaw() { signal_tree CONT "$STATE/broker/$1/pid"; }

broker_restart() {
    broker_stop "$1"
    broker_start "$1"
}

broker_rm() {
    local dir=$STATE/broker/$1
    [ -d "$dir" ] || return 0
    broker_kill9 "$1"
    ports_release "$dir"/port*
    rm -rf "$dir" "$STATE/.lock-broker-$1"
}

# A memory alarm: publishers are blocked at once, and free again when it is lifted.
broker_block() { broker_watermark "$1" 1000000; }
broker_unblock() { broker_watermark "$1" 1000000000; }

# What `rabbitmqctl set_vm_memory_high_watermark absolute N` does, at a quarter of its price.
broker_watermark() {
    local name=$1 dir=$STATE/broker/$1 said
    alive "$dir/pid" || die "broker $name does not run"
    said=$(
        broker_env "$name"
        cd "$dir" || exit
        ${AS[@]+"${AS[@]}"} erl -noinput -hidden -sname "ctl-$$-$RANDOM@localhost" -eval "
            R = rpc:call('$name@localhost', vm_memory_monitor, set_vm_memory_high_watermark, [{absolute, $2}], 10000),
            io:format(\"~p\", [R]), halt()." </dev/null
    )
    [ "$said" = ok ] || die "the broker refused: $said"
}

broker_ctl() {
    local name=$1
    shift
    [ -d "$STATE/broker/$name" ] || die "there is no broker $name here"
    (
        broker_env "$name"
        cd "$STATE/broker/$name" || exit
        ${AS[@]+"${AS[@]}"} "$SBIN/rabbitmqctl" "$@"
    )
}

# ── epmd ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Erlang's port mapper, one for all brokers of this checkout: started here, so that it can be stopped here.
epmd_start() {
    local pidfile=$STATE/broker-epmd.pid port
    if alive "$pidfile"; then return; fi
    # brokers that live know this port: keep it where it can be kept
    port=$(port_file "$STATE/broker-epmd.port")
    export ERL_EPMD_PORT=$port ERL_EPMD_ADDRESS=127.0.0.1
    daemon / "$STATE/epmd.log" epmd
    pid_save "$pidfile" "$DAEMON" || die "epmd did not start: $(<"$STATE/epmd.log")"
    until port_listening "$port"; do
        alive "$pidfile" || die "epmd did not start: $(<"$STATE/epmd.log")"
        sleep 0.02
    done
}

epmd_stop() {
    stop_gently "$STATE/broker-epmd.pid" TERM 2
    ports_release "$STATE/broker-epmd.port"
    rm -f "$STATE/broker-epmd.port"
}
