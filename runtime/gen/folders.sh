#!/bin/sh
# folders.sh: the folders of an installation.
#
#   folders.sh make DESTDIR LIST FOLDER...    make the folders below DESTDIR, and add those that were not there to DESTDIR/LIST
#   folders.sh remove DESTDIR LIST            remove the folders of DESTDIR/LIST that are empty, and the list
set -eu
action=$1 root=$2 list=$2$3
shift 3

made=
make() {
    [ -n "$1" ] && [ ! -d "$root$1" ] || return 0
    make "${1%/*}"
    mkdir -p "$root$1"
    made="$made$1
"
}

case $action in
make)
    for folder in "$@"; do make "${folder%/}"; done
    printf %s "$made" >>"$list"
    ;;
remove)
    [ -f "$list" ] || exit 0
    folders=$(sort -r "$list") # what lies within a folder comes before it
    rm -f "$list"
    for folder in $folders; do rmdir "$root$folder" 2>/dev/null || true; done
    ;;
*)
    echo "folders.sh: '$action' is neither make nor remove" >&2
    exit 2
    ;;
esac
