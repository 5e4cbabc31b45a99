# shellcheck shell=bash
# RabbitMQ 4 on a machine whose own is older: Debian 13's packages, unpacked once under .dev/rabbitmq-4. A broker
# sees that folder's /usr in place of the machine's, in a mount namespace of its own: nothing is installed, no mount is
# seen by others or outlives the process, and all else (ports, /proc, .dev) is where it was. Sourced by ./dev.

RABBITMQ4_SUITE=trixie # RabbitMQ 4.0.5
RABBITMQ4_ROOT=rabbitmq-4

rabbitmq4_root() { echo "$STATE/$RABBITMQ4_ROOT"; }

# What goes before a command that is to find this /usr. An ordinary user is root of a namespace of its own for that.
# Sets RABBITMQ4_IN.
rabbitmq4_in() {
    local user=()
    [ "$(id -u)" = 0 ] || user=(--user --map-root-user)
    # shellcheck disable=SC2016 # the inner shell's
    RABBITMQ4_IN=(unshare "${user[@]}" --mount sh -c 'mount --bind "$0" /usr && exec "$@"' "$(rabbitmq4_root)/usr")
}

# Fetches it where it is missing.
rabbitmq4_install() {
    [ -d "$(rabbitmq4_root)" ] || locked install rabbitmq4_fetch
    rabbitmq4_in
    local said
    said=$("${RABBITMQ4_IN[@]}" true 2>&1) ||
        die "RabbitMQ 4 needs a mount namespace of its own, and this machine gives none (run as root?): $said"
}

rabbitmq4_fetch() {
    local root part work log=$STATE/rabbitmq-4.log
    root=$(rabbitmq4_root) part=$root.part work=$root.apt
    [ ! -d "$root" ] || return 0 # another ./dev was faster
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || die "RabbitMQ 4 comes from Debian's packages: no apt here"
    say "fetching RabbitMQ 4 (Debian $RABBITMQ4_SUITE)"
    on_exit_undo "rm -rf '$part' '$work'"
    rm -rf "$part" "$work"
    mkdir -p "$part"
    rabbitmq4_packages "$work" >"$log" 2>&1 &&
        rabbitmq4_unpack "$work" "$part" >>"$log" 2>&1 ||
        { tail -n 20 "$log" >&2; die "RabbitMQ 4 could not be fetched (all of it: $log)"; }
    chmod -R u+rwX,a+rX "$part"
    mv "$part" "$root"
    rm -rf "$work"
    # shellcheck disable=SC2034
    UNDO=()
    say "fetched: $root"
}

# The packages and all they need, resolved by apt as if nothing were installed. apt's state is a folder of ours.
rabbitmq4_packages() {
    local work=$1 mirror
    mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -n 1)
    [ -n "$mirror" ] || mirror=$(sed -n 's/^deb \(\[[^]]*\] \)\?\([^ ]*\) .*/\2/p' /etc/apt/sources.list 2>/dev/null | head -n 1)
    mkdir -p "$work"/{lists/partial,archives/partial,parts}
    : >"$work/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian} $RABBITMQ4_SUITE main" \
        >"$work/sources.list"
    cat >"$work/apt.conf" <<CONF
Dir::State "$work"; Dir::State::status "$work/status"; Dir::Cache "$work";
Dir::Etc::sourcelist "$work/sources.list"; Dir::Etc::sourceparts "$work/parts"; Dir::Etc::preferencesparts "$work/parts";
APT::Install-Recommends "false"; APT::Sandbox::User ""; Acquire::Languages "none"; Acquire::Retries "3";
CONF
    export APT_CONFIG=$work/apt.conf DEBIAN_FRONTEND=noninteractive
    apt-get -qq update </dev/null &&
        apt-get -qq -y --download-only install base-files bash coreutils dash grep mawk sed util-linux rabbitmq-server </dev/null
}

# Unpacked, not installed: no package's script runs. What only those scripts need is left out.
rabbitmq4_unpack() {
    local work=$1 part=$2 deb
    dpkg-deb --fsys-tarfile "$work"/archives/base-files_*.deb | tar -x -C "$part" # first: its /bin is a link to /usr/bin
    for deb in "$work"/archives/*.deb; do
        case ${deb##*/} in
            base-files_* | python3* | libpython3* | perl* | libperl* | dpkg_* | debconf_* | adduser_* | ca-certificates_*) ;;
            *)
                dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$part" --keep-directory-symlink --no-same-owner \
                    --exclude='./usr/share/doc' --exclude='./usr/share/man' --exclude='./usr/share/locale' || return
                ;;
        esac
    done
    find "$part" -mindepth 1 -maxdepth 1 ! -name usr -exec rm -rf {} +
    compgen -G "$part/usr/lib/rabbitmq/lib/rabbitmq_server-4.*/sbin/rabbitmq-server" >/dev/null
}
