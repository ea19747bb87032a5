#!/bin/sh
# setup.sh PACKAGE...: install Debian or Ubuntu packages when we may; otherwise print the one line that would. Never fails: the build
# goes on with what is there and says itself what it cannot do without.
#
# setup.sh --lists: see that apt has its package lists, which are the data of the demonstration.
set -u
[ $# -gt 0 ] || exit 0
lists() { ls "${APT_LISTS:-/var/lib/apt/lists}"/*_Packages* >/dev/null 2>&1; }
if [ "$1" = --lists ]; then
    if lists || ! command -v apt-get >/dev/null 2>&1; then exit 0; fi
    if [ "$(id -u)" -eq 0 ]; then
        echo "perilune: fetching the package lists"
        apt-get update -qq || true
    else
        echo "perilune: there are no package lists to train on. To fetch them, run:"
        echo "  sudo apt-get update"
    fi
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "perilune: not found, and this system has no apt-get to install it: $*"
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "perilune: some packages are missing. To install them, run:"
    echo "  sudo apt-get install -y $*"
    echo "perilune: going on with what is there"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 "$@" >"$log" 2>&1; }
log=$(mktemp) || exit 0
trap 'rm -f "$log"' EXIT
echo "perilune: installing $*"
if lists && install "$@"; then exit 0; fi
apt-get update -qq >"$log" 2>&1 || tail -n 3 "$log"
install "$@" && exit 0
# One package that this release does not have must not keep the others away.
for package in "$@"; do
    install "$package" || { echo "perilune: $package could not be installed:"; tail -n 3 "$log"; }
done
exit 0
