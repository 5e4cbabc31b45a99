# shellcheck shell=bash
# RabbitMQ of another major version than the machine's own: a Debian release's packages, unpacked once under
# .dev/rabbitmq-VERSION. A broker sees that folder's /usr in place of the machine's, in a mount namespace of its own:
# nothing is installed, no mount is seen by others or outlives the process, and all else (ports, /proc, .dev) is where it
# was. Sourced by ./dev.

rabbitmq_suite() { # VERSION
    case $1 in
        3) echo bookworm ;; # 3.10.8
        4) echo trixie ;;   # 4.0.5
        *) die "RabbitMQ $1 is not known here; 3 and 4 are" 2 ;;
    esac
}

rabbitmq_root() { echo "$STATE/rabbitmq-$1"; }

# rabbitmq_in VERSION: sets RABBITMQ_IN, what goes before a command that is to find that /usr. An ordinary user is root
# of a namespace of its own for that.
rabbitmq_in() {
    local user=()
    [ "$(id -u)" = 0 ] || user=(--user --map-root-user)
    # shellcheck disable=SC2016 # the inner shell's
    RABBITMQ_IN=(unshare ${user[@]+"${user[@]}"} --mount sh -c 'mount --bind "$0" /usr && exec "$@"' "$(rabbitmq_root "$1")/usr")
}

# Fetches it where it is missing.
rabbitmq_install() { # VERSION
    [ -d "$(rabbitmq_root "$1")" ] || locked install rabbitmq_fetch "$1"
    rabbitmq_in "$1"
    local said
    said=$("${RABBITMQ_IN[@]}" true 2>&1) ||
        die "RabbitMQ $1 needs a mount namespace of its own, and this machine gives none (run as root?): $said"
}

rabbitmq_fetch() { # VERSION
    local suite root part work log=$STATE/rabbitmq-$1.log
    suite=$(rabbitmq_suite "$1") root=$(rabbitmq_root "$1")
    part=$root.part work=$root.apt
    [ ! -d "$root" ] || return 0 # another ./dev was faster
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || die "RabbitMQ $1 comes from Debian's packages: no apt here"
    say "fetching RabbitMQ $1 (Debian $suite)"
    on_exit_undo "rm -rf '$part' '$work'"
    rm -rf "$part" "$work"
    mkdir -p "$part"
    rabbitmq_packages "$work" "$suite" >"$log" 2>&1 &&
        rabbitmq_unpack "$work" "$part" >>"$log" 2>&1 ||
        { tail -n 20 "$log" >&2; die "RabbitMQ $1 could not be fetched (all of it: $log)"; }
    chmod -R u+rwX,a+rX "$part"
    mv "$part" "$root"
    rm -rf "$work"
    # shellcheck disable=SC2034
    UNDO=()
    say "fetched: $root"
}

# The packages and all they need, resolved by apt as if nothing were installed. apt's state is a folder of ours.
rabbitmq_packages() { # WORK SUITE
    local work=$1 suite=$2 mirror
    mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -n 1)
    [ -n "$mirror" ] || mirror=$(sed -n 's/^deb \(\[[^]]*\] \)\?\([^ ]*\) .*/\2/p' /etc/apt/sources.list 2>/dev/null | head -n 1)
    mkdir -p "$work"/{lists/partial,archives/partial,parts}
    : >"$work/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian} $suite main" \
        >"$work/sources.list"
    cat >"$work/apt.conf" <<CONF
Dir::State "$work"; Dir::State::status "$work/status"; Dir::Cache "$work";
Dir::Etc::sourcelist "$work/sources.list"; Dir::Etc::sourceparts "$work/parts"; Dir::Etc::preferencesparts "$work/parts";
APT::Install-Recommends "false"; APT::Sandbox::User ""; Acquire::Languages "none"; Acquire::Retries "3";
CONF
    export APT_CONFIG=$work/apt.conf DEBIAN_FRONTEND=noninteractive
    apt-get -qq update </dev/null &&
        apt-get -qq -y --download-only install bash coreutils dash grep mawk sed util-linux rabbitmq-server </dev/null
}

# Unpacked, not installed: no package's script runs. What only those scripts need is left out.
rabbitmq_unpack() { # WORK ROOT
    local work=$1 part=$2 deb dir
    for dir in bin sbin lib lib64; do # what an installation has as links
        mkdir -p "$part/usr/$dir"
        ln -s "usr/$dir" "$part/$dir"
    done
    for deb in "$work"/archives/*.deb; do
        case ${deb##*/} in
            python3* | libpython3* | perl* | libperl* | dpkg_* | debconf_* | adduser_* | ca-certificates_*) ;;
            *)
                dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$part" --keep-directory-symlink --no-same-owner \
                    --exclude='./usr/share/doc' --exclude='./usr/share/man' --exclude='./usr/share/locale' || return
                ;;
        esac
    done
    find "$part" -mindepth 1 -maxdepth 1 ! -name usr -exec rm -rf {} +
    compgen -G "$part/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server" >/dev/null
}
