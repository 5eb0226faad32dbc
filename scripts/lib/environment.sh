# Sourced by scripts/demo and scripts/test: Debian packages, a virtual environment, and the paths of both.
#
#   need_packages PACKAGE...   install what is missing, without starting any system service
#   need_environment EXTRAS    make or refresh .venv from constraints.txt
#   need_peer NAME VERSION     a package to compare with, into .cache/peers, without what it depends on
#   need_peers LIST            the packages that scripts/lib/LIST.txt names, in the same way
#
# Nothing outside the repository is changed except that Debian packages are installed.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
environment="$repository/.venv"

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

# Run a command as root: directly, or by sudo if that asks no question.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        sudo -n "$@"
    else
        return 1
    fi
}

need_packages() {
    local missing=() package
    command -v dpkg-query >/dev/null && command -v apt-get >/dev/null || return 1
    for package in "$@"; do
        [ "$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null)" = "install ok installed" ] || missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] && return 0
    say "Installing Debian packages: ${missing[*]}"
    # A policy script that answers 101 keeps the packages' services from being started; ours are started by hand.
    local policy=/usr/sbin/policy-rc.d ours=no status=0
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null || return 1
        as_root chmod 755 "$policy" && ours=yes
    fi
    as_root apt-get update -qq >&2 || status=1
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2 || status=1
    [ "$ours" = yes ] && as_root rm -f "$policy"
    return $status
}

# The interpreter for the environment: Debian's own first (it has the shared library that packaging needs).
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" /usr/bin/python3 python3.13 python3.12 python3.11 python3; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

need_environment() {
    local extras=$1 python stamp wanted installed="" each
    stamp="$environment/.installed"
    wanted=$(cat "$repository/pyproject.toml" "$repository/constraints.txt" | sha256sum | cut -d' ' -f1)
    # The stamp holds the digest of what was installed from, and the extras: more of them than asked for will do.
    if [ -x "$environment/bin/python" ] && [ -e "$stamp" ]; then
        read -r each installed <"$stamp" || true
        if [ "$each" = "$wanted" ] && has_extras "$installed" "$extras"; then
            return 0
        fi
        extras="$extras${installed:+,$installed}"
    fi
    python=$(find_python) || fail "Python 3.11 or newer with venv is needed (Debian: apt-get install python3 python3-venv)."
    if [ ! -x "$environment/bin/python" ]; then
        say "Making a virtual environment in $environment with $python"
        "$python" -m venv "$environment" || fail "The virtual environment could not be made in $environment."
    fi
    say "Installing Python packages (some minutes the first time)"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$repository/constraints.txt" --editable "$repository[$extras]" >&2 ||
        fail "The Python packages could not be installed; see the messages above."
    printf '%s %s\n' "$wanted" "$(tr ',' '\n' <<<"$extras" | sort -u | paste -sd,)" >"$stamp"
}

need_peer() {
    local folder="$repository/.cache/peers"
    [ -d "$folder/$1-$2.dist-info" ] && return 0
    say "Installing $1 $2 into $folder"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
        --target "$folder" "$1==$2" >&2
}

need_peers() {
    local folder="$repository/.cache/peers" list="$repository/scripts/lib/$1.txt"
    cmp -s "$list" "$folder/$1.txt" && return 0
    say "Installing what $list names into $folder"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
        --target "$folder" --requirement "$list" >&2 && cp "$list" "$folder/$1.txt"
}

# Whether the comma-separated list $1 holds every entry of the list $2.
has_extras() {
    local each
    for each in ${2//,/ }; do
        [[ ",$1," == *",$each,"* ]] || return 1
    done
}
