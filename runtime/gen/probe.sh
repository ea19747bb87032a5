#!/bin/sh
# probe.sh: look for what the build can use and write it as make variables (stdout). Absence is a value, not a failure.
#
# Each HAVE_x is empty or the version found; flags come from pkg-config where a package has a file for it.
set -u
export PKG_CONFIG_PATH="${PKG_CONFIG_PATH:-}"
CC=${CC:-cc}

try() { # try FLAGS: does the program on stdin compile and link?
    cat >"$tmp/t.c" && $CC "$tmp/t.c" -o "$tmp/t" "$@" >"$tmp/log" 2>&1
}
say() { printf '%s := %s\n' "$1" "$2"; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT

echo "# written by runtime/gen/probe.sh; 'make probe' looks again"
if echo '#include <stdio.h>
int main(void){return puts("")==0;}' | try; then
    say HAVE_CC "$($CC --version 2>/dev/null | head -n 1)"
else
    say HAVE_CC ""
fi
say HAVE_PKG_CONFIG "$(pkg-config --version 2>/dev/null)"

# LuaJIT: the interpreter for the generators and tests, the library for the launcher.
say HAVE_LUAJIT "$(luajit -v 2>/dev/null | cut -d' ' -f2)"
flags=$(pkg-config --cflags luajit 2>/dev/null)
archive=$(pkg-config --variable=libdir luajit 2>/dev/null)/libluajit-5.1.a
[ -f "$archive" ] || archive=$(pkg-config --libs luajit 2>/dev/null)
# The launcher carries bytecode that the interpreter writes, so both must be of one kind.
luajit -b -e 'return 7' "$tmp/t.luac" 2>/dev/null
if printf '#include <lua.h>\n#include <lauxlib.h>\nint main(int c,char**v){lua_State*L=luaL_newstate();return !L||c<2||luaL_loadfile(L,v[1]);}\n' |
    try $flags $archive -lm -ldl && "$tmp/t" "$tmp/t.luac"; then
    say HAVE_LUAJIT_LIB yes
    say LUAJIT_CFLAGS "$flags"
    say LUAJIT_LIBS "$archive -lm -ldl"
else
    say HAVE_LUAJIT_LIB ""
fi

# OpenBLAS (needed).
flags=$(pkg-config --cflags openblas 2>/dev/null)
libs=$(pkg-config --libs openblas 2>/dev/null || echo -lopenblas)
if printf '#include <cblas.h>\n#include <stdio.h>\nint main(void){puts(openblas_get_config());return 0;}\n' | try $flags $libs; then
    say HAVE_OPENBLAS "$("$tmp/t" | cut -d' ' -f2)"
    say OPENBLAS_CFLAGS "$flags"
    say OPENBLAS_LIBS "$libs"
else
    say HAVE_OPENBLAS ""
fi

# oneDNN (faster f32 products): found by the library itself at run time.
say HAVE_ONEDNN "$(luajit -e 'local ffi = require "ffi" ffi.cdef "const int *dnnl_version(void)"
    for v = 3, 1, -1 do
        for minor = 15, -1, -1 do -- as runtime/backends/cpu_gemm.c does
            local ok, dnnl = pcall(ffi.load, "libdnnl.so." .. v .. (minor < 0 and "" or "." .. minor))
            if ok then local n = dnnl.dnnl_version() print(n[0] .. "." .. n[1]) os.exit() end
        end
    end' 2>/dev/null)"

# xxHash (needed: checksums, id hashing).
if printf '#include <xxhash.h>\n#include <stdio.h>\nint main(void){printf("%%u\\n",XXH_versionNumber());return 0;}\n' | try -lxxhash; then
    say HAVE_XXHASH "$("$tmp/t")"
else
    say HAVE_XXHASH ""
fi

# liburing (optional: row files are read by io_uring; else by threads). Headers before 2.0 are not of C11.
if printf '#include <liburing.h>\nint main(void){struct io_uring r;return io_uring_queue_init(8,&r,0)==1;}\n' | try -std=c11 -D_GNU_SOURCE -luring; then
    say HAVE_URING "$(pkg-config --modversion liburing 2>/dev/null || echo yes)"
else
    say HAVE_URING ""
fi

# zlib (optional: packed files of data, gzip and npz).
if printf '#include <zlib.h>\n#include <stdio.h>\nint main(void){printf("%%s\\n",zlibVersion());return 0;}\n' | try -lz; then
    say HAVE_ZLIB "$("$tmp/t")"
else
    say HAVE_ZLIB ""
fi

# libmicrohttpd (optional: perilune serve).
if printf '#include <microhttpd.h>\nint main(void){return MHD_get_version()==0;}\n' | try -lmicrohttpd; then
    say HAVE_MICROHTTPD "$(pkg-config --modversion libmicrohttpd 2>/dev/null || echo yes)"
else
    say HAVE_MICROHTTPD ""
fi

# Open MPI: flags through its own compiler wrapper, so that our compiler is used.
if command -v mpicc >/dev/null 2>&1; then
    flags=$(mpicc --showme:compile 2>/dev/null)
    libs=$(mpicc --showme:link 2>/dev/null)
    if printf '#include <mpi.h>\nint main(int c,char**v){return MPI_Init==0;}\n' | try $flags $libs; then
        say HAVE_MPI "$(mpirun --version 2>/dev/null | head -n 1 | sed 's/.*) //')"
        say MPI_CFLAGS "$flags"
        say MPI_LIBS "$libs"
    else
        say HAVE_MPI ""
    fi
else
    say HAVE_MPI ""
fi

# CUDA and NCCL: found here, used by the CUDA and NCCL plugins.
nvcc=$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc)
say CUDA_HOME "$([ -n "$nvcc" ] && dirname "$(dirname "$(readlink -f "$nvcc")")")"
say HAVE_CUDA "$(${nvcc:-false} --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
nccl=""
for dir in /usr/include /usr/local/cuda/include; do
    [ -f $dir/nccl.h ] && nccl=$(sed -n 's/^#define NCCL_MAJOR *//p;s/^#define NCCL_MINOR */./p;s/^#define NCCL_PATCH */./p' $dir/nccl.h | tr -d '\n')
done
say HAVE_NCCL "$nccl"

# Tests, lint, pictures.
say HAVE_CXX "$(printf 'int main() { return 0; }\n' | c++ -std=c++17 -x c++ - -o /dev/null 2>/dev/null && c++ -dumpfullversion)"
say HAVE_BUSTED "$(busted --version 2>/dev/null | head -n 1)"
if printf '#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <setjmp.h>\n#include <cmocka.h>\nint main(void){return 0;}\n' |
    try -lcmocka; then
    say HAVE_CMOCKA "$(pkg-config --modversion cmocka 2>/dev/null || echo yes)"
else
    say HAVE_CMOCKA ""
fi
say HAVE_IP "$(ip -V 2>/dev/null | sed -n 's/.*iproute2-\([0-9.]*\).*/\1/p')"
say HAVE_CURL "$(curl --version 2>/dev/null | sed -n '1s/^curl \([0-9.]*\).*/\1/p')"
say HAVE_LUACHECK "$(luacheck --version 2>/dev/null | sed -n 's/^Luacheck: *//p')"
say HAVE_GNUPLOT "$(gnuplot --version 2>/dev/null | cut -d' ' -f2,4)"
say HAVE_ARGPARSE "$(luajit -e 'print(pcall(require, "argparse") and "yes" or "")' 2>/dev/null)"
say HAVE_DKJSON "$(luajit -e 'local ok, m = pcall(require, "dkjson"); print(ok and m.version or "")' 2>/dev/null | sed "s/dkjson *//")"
