# Perilune's only build file.
#
#   make                 build everything under build/
#   make demo            set up, build, train a DLRM on 2 ranks       RANKS= STEPS= PLAN= SCHEDULE= DATA= CHECKPOINT= ARGS=
#                        CHECKPOINT=FOLDER: goes on from there; how it saves: EVERY=10s FULL_EVERY= KEEP= ASYNC=1
#                        DEVICE=cuda: on the machine's GPUs, a rank each (builds the plugin with nvcc: minutes)
#   make demo-serve      that model as one file behind HTTP, asked five questions, following its trainer   RANKS= DATA= ARGS=
#   make test            set up, build, run every test
#   make fuzz            every fuzzer for SECONDS=60, with other inputs each time   SECONDS= SEED= ONLY=
#   make check-kills     kills saving processes KILLS=200 times of each kind, in chains of increments too (half an hour)
#   make stress          threads on one table and on one model, and the server, under the thread sanitizer   SECONDS=20
#   make fuzz-model      any bytes as model files and as requests, under the sanitizers of addresses and undefined behaviour   SECONDS=60
#   make bench           all benchmarks: bench-step bench-comm bench-embed bench-tiers bench-sparse bench-data bench-dense
#                        bench-routes bench-shard bench-collision bench-pipeline bench-plan bench-checkpoint bench-serve
#                        bench-retrieval bench-calls  ARGS= PYTHON=
#   make bench-net       bytes across the network and time, on pretended machines (as root)   MACHINES=2,2 RATE=1gbit ARGS=
#   make cuda            the devices' plugin cuda and the transport nccl, by nvcc (plain `make` leaves them out: minutes); CUDA=1 make
#   make cuda-report     what nvcc made of the kernels, beside what a GPU asks for: docs/benchmarks/gpu_kernels.md   NVDISASM=
#   make check-cuda      kernels/cuda compiled for the host: every spec of devices on it
#   make check-cuda-san  the short ones of them, under the sanitizers of addresses and of undefined behaviour
#   make gpu-check       on a machine with a GPU: short checks, the demonstration, the benchmark, sanitizers, specs   PARTS= MOST= ONLY=
#   make lint            layers, boundary, style
#   make reference       docs/reference, of lua/perilune/reference and the C headers
#   make amalgamation    two files for hosts that compile the library themselves: build/amalgamation
#   make check-amalgamation  compile them (a minute) and run a program of theirs
#   make contract        at a release: record what programs rely on, runtime/gen/contract.txt
#   make kept            at a release: keep programs that are built with it, tests/kept
#   make pictures        the pictures of the documents: docs/pictures (some need Chromium)   ONLY=
#   make install         PREFIX=/usr/local DESTDIR=
#   make probe           look again for libraries and print the table
#   make help            this text
#
# Switches: SAN=address|undefined|thread  DEBUG=1  V=1  CC=  (each SAN builds into its own folder)
#           ISA=native|avx2|avx512 (kernels for this processor, or for one instruction set, alone; a folder of its own)
#           MPI=1 CUDA=1 (absence is an error)  WERROR=1 (warnings are errors, as in continuous integration)
#           SEED= ONLY= (tests: order and inputs, a pattern of names)

.DEFAULT_GOAL := all
MAKEFLAGS += --no-builtin-rules
CORES := $(or $(shell nproc 2>/dev/null),2)
ifeq ($(MAKELEVEL)$(filter-out all,$(MAKECMDGOALS)),0)
MAKEFLAGS += -j$(CORES) # plain `make`; -j1 on the command line goes before it
endif
SHELL := /bin/sh
CC := $(if $(filter default,$(origin CC)),cc,$(CC))

VERSION := $(shell awk '/^.define PERI_VERSION_/ { printf "%s%s", dot, $$3; dot = "." }' runtime/include/perilune/base.h)
SOVERSION := $(shell sed -n 's/^enum { PERI_ABI_VERSION = \([0-9]*\).*/\1/p' runtime/include/perilune/base.h)
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
DESTDIR ?=
# Places are absolute, whatever the shell has made of them: they are written into perilune.pc.
place = $(if $(filter-out 1,$(words $(1))),$(error $(2)=$(1): one folder, without spaces),$(abspath $(call home,$(1))))
home = $(patsubst ~,$(HOME),$(patsubst ~/%,$(HOME)/%,$(1)))
override PREFIX := $(call place,$(PREFIX),PREFIX)
override LIBDIR := $(call place,$(LIBDIR),LIBDIR)
override DESTDIR := $(if $(DESTDIR),$(call place,$(DESTDIR),DESTDIR))
SAN ?=
DEBUG ?=
V ?=
WERROR ?=
Q := $(if $(V),,@)

ifneq ($(filter-out address undefined thread,$(SAN)),)
$(error SAN=$(SAN): allowed are address, undefined, thread)
endif

# Kernels are compiled for all instruction sets, which takes as long as all else, or, for those who change them, for one.
ISA ?=
FLAGS_HERE := $(if $(filter native,$(ISA)),$(shell grep -m 1 '^flags' /proc/cpuinfo))
ISA_HERE := $(if $(filter-out native,$(ISA)),$(ISA),$(if $(filter avx512vl,$(FLAGS_HERE)),avx512,$(if $(filter avx2,$(FLAGS_HERE)),avx2)))
ifneq ($(filter-out native avx2 avx512,$(ISA)),)
$(error ISA=$(ISA): allowed are native, avx2, avx512)
endif

B := build$(if $(SAN),/san-$(SAN))$(if $(DEBUG),/debug)$(if $(ISA),/isa-$(ISA))

# -- what the machine has ---------------------------------------------------------------------------------------------------------

CONFIG := build/config.mk
$(CONFIG): runtime/gen/probe.sh
	@mkdir -p $(@D)
	@CC="$(CC)" sh runtime/gen/probe.sh >$@.new && mv $@.new $@
ifneq ($(filter-out clean distclean help,$(or $(MAKECMDGOALS),all)),)
include $(CONFIG)
endif

# Debian and Ubuntu packages of what the probe looks for and did not find.
missing = $(if $($(1)),,$(2))
MISSING := $(strip $(call missing,HAVE_CC,gcc libc6-dev) $(call missing,HAVE_PKG_CONFIG,pkg-config) $(call missing,HAVE_LUAJIT,luajit) \
	$(call missing,HAVE_LUAJIT_LIB,libluajit-5.1-dev) $(call missing,HAVE_OPENBLAS,libopenblas-dev) \
	$(call missing,HAVE_ONEDNN,libdnnl-dev) $(call missing,HAVE_URING,liburing-dev) $(call missing,HAVE_XXHASH,libxxhash-dev) $(call missing,HAVE_ZLIB,zlib1g-dev) $(call missing,HAVE_MICROHTTPD,libmicrohttpd-dev) $(call missing,HAVE_MPI,openmpi-bin libopenmpi-dev) \
	$(call missing,HAVE_ARGPARSE,lua-argparse) $(call missing,HAVE_DKJSON,lua-dkjson) $(call missing,HAVE_BUSTED,lua-busted) \
	$(call missing,HAVE_CMOCKA,libcmocka-dev) $(call missing,HAVE_CXX,g++) $(call missing,HAVE_IP,iproute2) $(call missing,HAVE_CURL,curl) $(call missing,HAVE_LUACHECK,lua-check) $(call missing,HAVE_GNUPLOT,gnuplot-nox))

# -- sources ------------------------------------------------------------------------------------------------------------------------

LAYERS := base plugin tensor sparse collision comm embed plan shard io checkpoint model
CORE := $(sort $(foreach l,$(LAYERS),$(wildcard runtime/$(l)/*.c runtime/$(l)/*/*.c))) \
	$(wildcard $(foreach b,cpu opaque self sim,runtime/backends/$(b).c)) $(wildcard runtime/backends/cpu_*.c) runtime/host/host.c runtime/host/lua.c kernels/select.c kernels/ref/unit.c
ARCH := $(shell uname -m)
ISAS := $(if $(filter x86_64,$(ARCH)),$(if $(ISA),$(ISA_HERE),avx2 avx512))
HEADERS := $(sort $(wildcard runtime/include/perilune/*.h))
CDEF_HEADERS := $(filter-out %/host.h,$(HEADERS))
# Definition files describe the public API: for editors, the reference and `perilune help`. They are no modules.
DEFINITIONS := $(sort $(wildcard lua/perilune/reference/*.lua))
LUA := $(sort $(filter-out $(DEFINITIONS),$(shell find lua -name '*.lua')))

# Warnings are errors where the compilers are known ones, in continuous integration: other versions warn about other things.
ERRORS := $(if $(filter-out 0,$(WERROR)),-Werror)
WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wconversion -Wno-sign-conversion $(ERRORS)
CFLAGS ?= -O2 -g1
# A thread that calls the library has 64 KiB of stack (perilune/host.h). Sanitizers and debugging take more.
FRAMES := $(if $(SAN)$(DEBUG),,-Wframe-larger-than=49152)
SANFLAGS := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all)
PFLAGS := -std=c11 -D_GNU_SOURCE -fPIC -fvisibility=hidden -Iruntime/include $(OPENBLAS_CFLAGS) $(WARN) $(SANFLAGS) \
	$(if $(HAVE_URING),-DPERI_HAVE_URING) $(if $(HAVE_ZLIB),-DPERI_HAVE_ZLIB) $(if $(SAN)$(DEBUG),-DPERI_DEBUG)
# Floating point is IEEE; products and sums fuse only where a kernel says so, as in gcc with -std=c11: clang would fuse them, on ARM everywhere.
ROUNDING := -ffp-contract=off
KFLAGS := -O3 $(ROUNDING) -fno-math-errno -fno-trapping-math -Wno-conversion -Wno-float-conversion -Wno-unused-function
# Units of which gcc makes the same code, or as fast a one, without all of -O3, in two thirds of the time: loops are made into vectors, but
# not unrolled, and less is inlined. Their loops over registers say themselves that they are unrolled.
LEAN_UNITS := unit_product
# Only gcc knows the flags, and clang fuses, vectorizes and inlines by rules of its own. Recipes ask the compiler once, when they need them.
known = $(shell known() { echo 'int x;' | $(CC) -Werror $$1 -x c -c - -o /dev/null 2>/dev/null && echo "$$1"; }; \
	known '$(1)' || for flag in $(1); do known $$flag; done)
LEAN = $(eval LEAN := -O2 $(call known,-fvect-cost-model=dynamic -fversion-loops-for-strides -funswitch-loops -fsplit-loops))$(LEAN)
# How much of a unit may be inlined is a share of its size: with gcc's own, 40, what is inlined would depend on which families share a unit.
UNIT_FLAGS = $(eval UNIT_FLAGS := $(call known,--param=inline-unit-growth=60))$(UNIT_FLAGS)
FLAGS_avx2 := -mavx2 -mfma -mf16c -mbmi2 -mtune=haswell -Wno-psabi
FLAGS_avx512 := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mbmi2 -mprefer-vector-width=512 -mtune=znver3

# Units of kernels, or their pieces (unit_tbe_forward.int8): see kernels/cpu/unit.h. First, because they take longest to compile.
PIECES := $(shell cd kernels/cpu && for u in unit_*.c; do all=$$(sed -n 's/^ \* pieces: //p' $$u); \
	for p in $${all:-$$u}; do [ $$p = $$u ] && echo $${u%.c} || echo $${u%.c}.$$p; done; done)
KERNEL_UNITS := $(foreach isa,$(ISAS),$(PIECES:%=$B/obj/kernels/cpu/$(isa)/%.o))
OBJ := $(KERNEL_UNITS) $(CORE:%.c=$B/obj/%.o)
LIB_A := $B/libperilune.a
LIB_SO := $B/libperilune.so.$(VERSION)
# Functions of earlier releases, for programs that were built then: in the shared library only, whose symbols have versions.
KEPT := runtime/host/renamed.c
KEPT_OBJ := $(KEPT:%.c=$B/obj/%.o)
LIBS := -lxxhash $(if $(HAVE_URING),-luring) $(if $(HAVE_ZLIB),-lz) -lpthread -ldl -lm

# A backend that is a plugin: a folder, runtime/backends/<name>/, and one line here: $(call plugin,<name>,<compiler's flags>,<libraries>).
plugin_obj = $(patsubst %.c,$B/obj/%.o,$(wildcard runtime/backends/$(1)/*.c))
define plugin
PLUGINS += $B/libperilune_$(1).so
PLUGIN_OBJ += $(call plugin_obj,$(1))
$(call plugin_obj,$(1)): EXTRA := $(2)
$B/libperilune_$(1).so: PLUGIN_LIBS := $(3)
$B/libperilune_$(1).so: $(call plugin_obj,$(1))
endef
$(if $(HAVE_MPI),$(eval $(call plugin,mpi,-Wno-unused-parameter $(MPI_CFLAGS),$(MPI_LIBS) -lpthread)))
$(eval $(call plugin,loopback,,))

# CUDA: the same sources twice, by nvcc for GPUs and by the C++ compiler on tests/cuda_host for tests: the devices cuda and cuda_host.
CU := $(sort $(wildcard kernels/cuda/*.cu))
CU_C := kernels/cuda/table.c $(wildcard runtime/backends/cuda/*.c)
CU_ARCHS := 80 90
NVCC_FLAGS := -std=c++17 -O3 -fmad=false -Iruntime/include -Xcompiler -fPIC,-fvisibility=hidden,-Wall $(if $(ERRORS),-Werror all-warnings)
CU_CODE := $(foreach a,$(CU_ARCHS),-gencode arch=compute_$a,code=sm_$a) -gencode arch=compute_$(lastword $(CU_ARCHS)),code=compute_$(lastword $(CU_ARCHS))
NVCC := $(CUDA_HOME)/bin/nvcc
CUDA_HOST := $(if $(HAVE_CXX),$B/cuda_host/libperilune_cuda_host.so)
CUDA_HOST_OBJ := $(CU:%.cu=$B/cuda_host/%.o) $(patsubst %.c,$B/cuda_host/%.o,$(filter-out %/table.c,$(CU_C))) $(patsubst %.cc,$B/cuda_host/%.o,$(filter-out %/nccl.cc,$(wildcard tests/cuda_host/*.cc))) \
	$(patsubst %.c,$B/cuda_host/%.o,$(wildcard tests/cuda_host/*.c))
# Once more, with tests/cuda_host/races.cc told of every access of the device's code, which is optimized here: places are told apart above.
RACES := $(if $(SAN),,$(if $(HAVE_CXX),$B/cuda_host/races/libperilune_cuda_host.so))
RACES_FLAGS := -DPERI_CUDA_HOST_RACES -fsanitize=thread --param tsan-distinguish-volatile=1 --param tsan-instrument-func-entry-exit=0
RACES_OBJ := $(CU:%.cu=$B/cuda_host/races/%.o) $B/cuda_host/races/tests/cuda_host/races.o
# The transport nccl, likewise twice; tests have a libnccl.so.2 of their own beside it.
NCCL_C := $(wildcard runtime/backends/nccl/*.c)
NCCL_HOST := $(if $(HAVE_CXX),$B/cuda_host/libperilune_nccl.so $B/cuda_host/libnccl.so.2)
NCCL_HOST_OBJ := $(NCCL_C:%.c=$B/cuda_host/%.o)
NCCL_SO := $(if $(HAVE_NCCL),$B/libperilune_nccl.so)
NCCL_OBJ := $(NCCL_C:%.c=$B/cuda/%.o)
CUDA_SO := $B/libperilune_cuda.so
CUDA_OBJ := $(CU:%.cu=$B/cuda/%.o) $(CU_C:%.c=$B/cuda/%.o)
# What tests see of nvcc: every source without a warning, as PTX (machine code takes ten times as long), and the C of both plugins.
CU_SEEN := $(if $(SAN),,$(if $(HAVE_CUDA),$(CU:%.cu=$B/cuda/%.ptx) $(CU_C:%.c=$B/cuda/%.o) $B/cuda/tests/cuda_host/kernels.o $(if $(HAVE_NCCL),$(NCCL_OBJ))))
# tests/cuda_host plays the CUDA headers. Its sources are C++, checked less than the core's.
CXXFLAGS := -std=c++17 -O2 -g1 -fno-omit-frame-pointer -fPIC -fvisibility=hidden -ffp-contract=off -Itests/cuda_host -I. -Iruntime/include -Wall -Wextra $(ERRORS) -Wno-unused-function \
	-Wno-missing-field-initializers $(SANFLAGS)
# Kernels for the host call memory.cc before each access at an address that its type does not allow.
CU_ALIGN := $(if $(SAN),,-fsanitize=alignment)
# Kernels for the host are not optimized: the stand-in tells calls apart by the addresses that they return to (places.cc), so no call may be
# merged with another one, nor copied. Case lists take a third longer for it, compiling a fraction.
CU_HOST_FLAGS := $(CXXFLAGS) $(CU_ALIGN) -O0

LAUNCHER := $(if $(HAVE_LUAJIT_LIB),$(if $(HAVE_ARGPARSE),$B/perilune))
# What `perilune serve` becomes: a program of its own, so that nothing else has the HTTP library in it. Its objects, but for main, are an
# archive that tests link, too.
SERVER := $(if $(HAVE_MICROHTTPD),$B/perilune-serve)
SERVE_A := $B/serve.a
SERVE_OBJ := $(patsubst %.c,$B/obj/%.o,$(filter-out runtime/serve/serve_main.c $(if $(HAVE_MICROHTTPD),,runtime/serve/http.c),$(wildcard runtime/serve/*.c))) $B/obj/serve_page.o
CDEF := $B/lua/perilune/cdef.lua
LUA_SO := $(if $(LAUNCHER),$B/libperilune_lua.so)

.PHONY: all stress fuzz-model kept amalgamation check-amalgamation contract help probe config needed setup test check check-c check-lua parity reference pictures check-mpi check-net check-kills check-cuda check-cuda-san check-cuda-short gpu-check gpu-check-run fuzz demo demo-run demo-serve demo-serve-run lint install uninstall clean distclean \
	bench bench-step bench-comm bench-embed bench-tiers bench-sparse bench-data bench-dense bench-routes bench-shard bench-collision bench-net \
	bench-pipeline bench-plan bench-checkpoint bench-serve bench-retrieval bench-calls
.DELETE_ON_ERROR:

all: needed $(LIB_A) $(LIB_SO) $(PLUGINS) $(LUA_SO) $(CDEF) $B/abi.ok $(LAUNCHER) $(SERVER) $(if $(filter 1,$(CUDA)),$(CUDA_SO) $(NCCL_SO))

help:
	@sed -n '3,$$ { /^#/!q; s/^# \{0,1\}//; p }' Makefile

# -- the table of what was found ----------------------------------------------------------------------------------------------------

row = @printf '  %-10s %-42s %s\n' '$(1)' '$(if $($(2)),$($(2)),-- not found)' '$(3)'
config:
	@echo 'Perilune $(VERSION), build in $B'
	$(call row,compiler,HAVE_CC,needed)
	$(call row,LuaJIT,HAVE_LUAJIT,needed)
	$(call row,libluajit,HAVE_LUAJIT_LIB,for the launcher)
	$(call row,OpenBLAS,HAVE_OPENBLAS,needed)
	$(call row,oneDNN,HAVE_ONEDNN,for faster matrix products)
	$(call row,xxHash,HAVE_XXHASH,needed)
	$(call row,liburing,HAVE_URING,for faster reads of tables in files)
	$(call row,zlib,HAVE_ZLIB,for packed files of data: gzip and npz)
	$(call row,libmicrohttpd,HAVE_MICROHTTPD,for perilune serve)
	$(call row,Open MPI,HAVE_MPI,for more than one process)
	$(call row,CUDA,HAVE_CUDA,for GPUs (make cuda))
	$(call row,NCCL,HAVE_NCCL,for GPUs (make cuda))
	$(call row,C++,HAVE_CXX,for tests of CUDA sources without a GPU)
	$(call row,argparse,HAVE_ARGPARSE,for the launcher)
	$(call row,dkjson,HAVE_DKJSON,for logs)
	$(call row,busted,HAVE_BUSTED,for tests)
	$(call row,cmocka,HAVE_CMOCKA,for tests)
	$(call row,luacheck,HAVE_LUACHECK,for lint)
	$(call row,iproute2,HAVE_IP,for tests on several machines)
	$(call row,curl,HAVE_CURL,for tests of perilune serve and make demo-serve)
	$(call row,gnuplot,HAVE_GNUPLOT,for pictures)

probe:
	@rm -f $(CONFIG)
	@$(MAKE) --no-print-directory config

# Before anything is compiled: everything that is made has this as an order-only prerequisite.
needed: $(if $(wildcard $B/libperilune.a),,config)
	@missing=; for have in 'a C compiler=$(HAVE_CC)' 'LuaJIT=$(HAVE_LUAJIT)' 'OpenBLAS=$(HAVE_OPENBLAS)' 'xxHash=$(HAVE_XXHASH)'; do \
	  case "$$have" in *=) missing="$$missing$${missing:+, }$${have%=}";; esac; done; [ -z "$$missing" ] || { \
	  echo "perilune: needed and not found: $$missing. Run: make setup" >&2; exit 1; }
	@$(if $(filter 1,$(MPI)),$(if $(HAVE_MPI),:,echo 'perilune: MPI=1 but Open MPI was not found. Run: make setup' >&2; exit 1),:)
	@$(if $(filter 1 cuda,$(CUDA) $(MAKECMDGOALS)),$(if $(HAVE_CUDA),:,echo 'perilune: CUDA was not found: install the CUDA Toolkit (nvcc)' >&2; exit 1),:)

# Install what is missing (as root on Debian and Ubuntu), or say the one line that would; then look again.
setup:
	@$(if $(filter demo,$(SETUP_FOR)),sh runtime/gen/setup.sh --lists)
	@$(if $(MISSING),sh runtime/gen/setup.sh $(MISSING); rm -f $(CONFIG),:)
	@$(if $(MISSING),$(if $(wildcard $B/libperilune.a),$(MAKE) --no-print-directory config))

# -- compiling ----------------------------------------------------------------------------------------------------------------------

$B/obj/kernels/ref/unit.o: EXTRA := $(KFLAGS)
$B/obj/kernels/select.o: EXTRA := $(KFLAGS) $(ISAS:%=-DPERI_ISA_%)
# These call functions of the program's: runtime/base/border.h.
$(addprefix $B/obj/runtime/,$(addsuffix .o,base/alloc base/error base/threads tensor/storage host/host)): EXTRA := -fexceptions
$B/obj/runtime/backends/cpu_gemm.o: EXTRA := -DPERI_OPENBLAS_FOLDER='"$(patsubst -L%,%,$(firstword $(filter -L%,$(OPENBLAS_LIBS))))"'

$B/obj/%.o: %.c $(CONFIG) | needed
	@mkdir -p $(@D)
	@$(if $(V),,echo '  CC      $<')
	$(Q)$(CC) $(CFLAGS) $(PFLAGS) $(ROUNDING) $(FRAMES) $(EXTRA) -MMD -MP -c $< -o $@

define compile_unit
$B/obj/kernels/cpu/$(1)/$(2).o: kernels/cpu/$(basename $(2)).c $(CONFIG) | needed
	@mkdir -p $$(@D)
	@$$(if $$(V),,echo '  CC      $$< ($(1)$(subst ., ,$(suffix $(2))))')
	$$(Q)$$(CC) $$(CFLAGS) $$(PFLAGS) $$(FRAMES) $$(KFLAGS) $(if $(filter $(LEAN_UNITS),$(2)),$$(LEAN)) $$(UNIT_FLAGS) $$(FLAGS_$(1)) -DK_ISA=$(1) $(patsubst .%,-DK_PIECE=%,$(suffix $(2))) -MMD -MP -c $$< -o $$@
endef
$(foreach isa,$(ISAS),$(foreach piece,$(PIECES),$(eval $(call compile_unit,$(isa),$(piece)))))

$(LIB_A): $(OBJ)
	@$(if $(V),,echo '  AR      $@')
	$(Q)rm -f $@ && ar crs $@ $^

# Its calls of its own functions stay its own (-Bsymbolic-functions), also in a program that holds another copy of them.
# A function has the version of the release that brought it: a program that needs a newer library is told so when it is loaded.
MAP := $B/perilune.map
CONTRACT = luajit runtime/gen/contract.lua $(1) $(CDEF) runtime/include/perilune runtime/gen/contract.txt runtime/gen/renamed.txt $(KEPT)
$(MAP): $(CDEF) $(HEADERS) $(KEPT) runtime/gen/contract.lua runtime/gen/renamed.txt $(wildcard runtime/gen/contract.txt)
	$(Q)$(call CONTRACT,map) >$@
# Write down what this release promises to the programs that are built with it.
contract: $(CDEF)
	@$(call CONTRACT,record)
# And keep some programs that were: spec/linking_spec.lua runs them with every later library of the same contract.
kept: all
	@mkdir -p tests/kept
	@for name in lookup train lua; do $(CC) -std=c11 -O1 -s -Iruntime/include examples/hosts/$$name.c -L$B -lperilune \
	  -o tests/kept/$$name-$(SOVERSION)-$(ARCH) || exit 1; done

# Two files, without MPI and CUDA, for hosts that compile the library with one call of their compiler.
amalgamation: needed
	@mkdir -p $B/amalgamation
	$(Q)luajit runtime/gen/amalgamation.lua $B/amalgamation $(VERSION) $(foreach p,$(PIECES),kernels/cpu/$(basename $p).c$(patsubst .%,:%,$(suffix $p))) $(CORE)
	@echo '$B/amalgamation/perilune.c, perilune.h: cc -std=gnu11 -O2 host.c perilune.c -lxxhash -lpthread -ldl -lm'

# The program of spec/linking_spec.lua, made of them; says how long the compiler took.
check-amalgamation: amalgamation
	@ln -sfn . $B/amalgamation/perilune
	bash -c "time $(CC) -std=gnu11 -O2 -DPROGRAM -I$B/amalgamation tests/linking/use.c $B/amalgamation/perilune.c -o $B/amalgamation/use -lxxhash -lpthread -ldl -lm"
	$B/amalgamation/use && PERI_CPU_ISA=ref $B/amalgamation/use

$(LIB_SO): $(OBJ) $(KEPT_OBJ) $(MAP)
	@$(if $(V),,echo '  LINK    $@')
	$(Q)$(CC) $(CFLAGS) $(SANFLAGS) -shared -Wl,-z,nodelete -Wl,-Bsymbolic-functions -Wl,-soname,libperilune.so.$(SOVERSION) -Wl,--version-script=$(MAP) $(if $(SAN),,-Wl,-z,defs) \
	  $(OBJ) $(KEPT_OBJ) $(LIBS) -o $@
	$(Q)ln -sf $(@F) $B/libperilune.so.$(SOVERSION) && ln -sf $(@F) $B/libperilune.so

$(PLUGINS):
	@$(if $(V),,echo '  PLUGIN  $@')
	$(Q)$(CC) $(CFLAGS) $(SANFLAGS) -shared $^ $(PLUGIN_LIBS) -o $@

# -- CUDA -----------------------------------------------------------------------------------------------------------------------------

.PHONY: cuda cuda-host
cuda: needed $(CUDA_SO) $(NCCL_SO)
cuda-host: needed $(CUDA_HOST) $(NCCL_HOST)

$B/cuda/%.o: %.cu $(CONFIG) | needed
	@mkdir -p $(@D)
	@$(if $(V),,echo '  NVCC    $<')
	$(Q)$(NVCC) $(NVCC_FLAGS) $(CU_CODE) -MMD -MP -c $< -o $@
# Optimized less, where nvcc can: a third of the time, and the law of barriers (tests/cuda/barriers.lua) reads it as well. Files without
# barriers are hardly optimized: a fifth of the time, in which that law would not find its way.
PTX_SPEED := mid
PTX_FLAGS = $(if $(findstring --Ofast-compile,$(shell $(NVCC) --help)),--Ofast-compile=$(PTX_SPEED))
$(patsubst %,$B/cuda/kernels/cuda/%.ptx,codec convert dense formula quantize sequence tbe_forward): PTX_SPEED := max
$B/cuda/%.ptx: %.cu $(CONFIG) | needed
	@mkdir -p $(@D)
	@$(if $(V),,echo '  PTX     $<')
	$(Q)$(NVCC) $(NVCC_FLAGS) $(PTX_FLAGS) -arch=compute_$(lastword $(CU_ARCHS)) -MMD -MP -MF $@.d -ptx $< -o $@
$B/cuda/%.o: %.c $(CONFIG) | needed
	@mkdir -p $(@D)
	@$(if $(V),,echo '  CC      $< (cuda)')
	$(Q)$(CC) $(CFLAGS) $(PFLAGS) $(EXTRA) -isystem $(CUDA_HOME)/include -MMD -MP -c $< -o $@
$(CUDA_SO): $(CUDA_OBJ)
	@$(if $(V),,echo '  PLUGIN  $@')
	$(Q)$(NVCC) -shared -Xlinker -z,defs -cudart static $(CUDA_OBJ) -L$(CUDA_HOME)/lib64 -lcublasLt -o $@

$B/cuda_host/%.o: %.cu $(CONFIG) | needed
	@mkdir -p $(@D)
	@$(if $(V),,echo '  CXX     $< (host)')
	$(Q)$(CXX) -x c++ $(CU_HOST_FLAGS) -MMD -MP -c $< -o $@
$B/cuda_host/%.o: %.cc $(CONFIG) | needed
	@mkdir -p $(@D)
	@$(if $(V),,echo '  CXX     $<')
	$(Q)$(CXX) $(CXXFLAGS) -MMD -MP -c $< -o $@
$B/cuda_host/races/%.o: %.cu $(CONFIG) | needed
	@mkdir -p $(@D)
	@$(if $(V),,echo '  CXX     $< (host, races)')
	$(Q)$(CXX) -x c++ $(CXXFLAGS) $(CU_ALIGN) $(RACES_FLAGS) -MMD -MP -c $< -o $@
$B/cuda_host/races/%.o: %.cc $(CONFIG) | needed
	@mkdir -p $(@D)
	@$(if $(V),,echo '  CXX     $< (races)')
	$(Q)$(CXX) $(CXXFLAGS) $(firstword $(RACES_FLAGS)) -MMD -MP -c $< -o $@
$(RACES): $(CUDA_HOST_OBJ) $(RACES_OBJ)
	@mkdir -p $(@D)
	@$(if $(V),,echo '  PLUGIN  $@')
	$(Q)$(CXX) -shared -Wl,-z,defs -Wl,-soname,$(@F) $(RACES_OBJ) $(filter-out $(RACES_OBJ:$B/cuda_host/races/%=$B/cuda_host/%),$(CUDA_HOST_OBJ)) -o $@
$B/cuda_host/%.o: %.c $(CONFIG) | needed
	@mkdir -p $(@D)
	@$(if $(V),,echo '  CC      $< (host)')
	$(Q)$(CC) $(CFLAGS) $(PFLAGS) -I. -Itests/cuda_host -MMD -MP -c $< -o $@
$(CUDA_HOST): $(CUDA_HOST_OBJ)
	@$(if $(V),,echo '  PLUGIN  $@')
	$(Q)$(CXX) $(SANFLAGS) -shared $(if $(SANFLAGS),,-Wl$(comma)-z$(comma)defs) -Wl,-soname,$(@F) $(CUDA_HOST_OBJ) -o $@
$B/cuda_host/libnccl.so.2: $B/cuda_host/tests/cuda_host/nccl.o
	@$(if $(V),,echo '  LINK    $@')
	$(Q)$(CXX) $(SANFLAGS) -shared -Wl,-soname,$(@F) $< -ldl -o $@
$B/cuda_host/libperilune_nccl.so: $(NCCL_HOST_OBJ)
	@$(if $(V),,echo '  PLUGIN  $@')
	$(Q)$(CC) $(SANFLAGS) -shared -Wl,-rpath,'$$ORIGIN' $(NCCL_HOST_OBJ) -ldl -o $@
$B/libperilune_nccl.so: $(NCCL_OBJ)
	@$(if $(V),,echo '  PLUGIN  $@')
	$(Q)$(CC) -shared $(NCCL_OBJ) -ldl -o $@
-include $(CUDA_HOST_OBJ:.o=.d) $(RACES_OBJ:.o=.d) $(CUDA_OBJ:.o=.d) $(CU:%.cu=$B/cuda/%.ptx.d) $(NCCL_HOST_OBJ:.o=.d) $(NCCL_OBJ:.o=.d)

# What nvcc made of the kernels: tests/cuda/report.lua, which writes its table to docs/benchmarks/gpu_kernels.md.
define compile_cubins
CUBIN += $(CU:kernels/cuda/%.cu=$B/cuda/sm_$(1)/%.cubin)
$B/cuda/sm_$(1)/%.cubin: kernels/cuda/%.cu $(CONFIG) | needed
	@mkdir -p $$(@D)
	@$$(if $$(V),,echo '  CUBIN   $$< (sm_$(1))')
	$$(Q)$$(NVCC) $$(NVCC_FLAGS) -arch=sm_$(1) -cubin -Xptxas -v -MMD -MP -MF $$@.d $$< -o $$@ 2>$$(@:cubin=log) || { cat $$(@:cubin=log); exit 1; }
endef
$(foreach a,$(CU_ARCHS),$(eval $(call compile_cubins,$a)))
NVDISASM ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvdisasm) nvdisasm)
.PHONY: cuda-report
cuda-report: $(CUBIN)
	@luajit tests/cuda/report.lua --nvdisasm '$(NVDISASM)' --doc docs/benchmarks/gpu_kernels.md $(foreach a,$(CU_ARCHS),$a:$B/cuda/sm_$a)
-include $(CUBIN:=.d)

# -- the boundary: one truth, generated ---------------------------------------------------------------------------------------------

$(CDEF): $(CDEF_HEADERS) runtime/gen/cdef.lua | needed
	@mkdir -p $(@D)
	@$(if $(V),,echo '  CDEF    $@')
	$(Q)$(CC) -E -DPERI_CDEF_PASS -Iruntime/include runtime/include/perilune/perilune.h | luajit runtime/gen/cdef.lua runtime/include/perilune >$@

# Layouts as LuaJIT sees them, asserted by the C compiler against the headers.
$B/abi.ok: $(CDEF) runtime/gen/abi.lua $(HEADERS)
	@$(if $(V),,echo '  ABI     $@')
	$(Q)luajit runtime/gen/abi.lua $(CDEF) >$B/abi.c
	$(Q)$(CC) -std=c11 -Iruntime/include -fsyntax-only $B/abi.c && touch $@


# -- the launcher -------------------------------------------------------------------------------------------------------------------

HOST := $(filter-out runtime/host/host.c runtime/host/lua.c $(KEPT),$(wildcard runtime/host/*.c))
HOST_OBJ := $(HOST:%.c=$B/obj/%.o)
# Under these sanitizers no library is unloaded: reports of leaks name the one that leaked, and those not looked into have to stay.
HOST_OBJ += $(if $(filter address thread,$(SAN)),$B/obj/tests/harness/keep_loaded.o)
$(HOST_OBJ): EXTRA := $(LUAJIT_CFLAGS)

MANUAL := $B/lua/perilune/manual.lua
$(MANUAL): $(DEFINITIONS) $(HEADERS) runtime/gen/reference.lua runtime/gen/annotations.lua runtime/gen/c_pages.lua runtime/gen/families.lua docs/glossary.md | needed
	@mkdir -p $(@D)
	@$(if $(V),,echo '  MANUAL  $@')
	$(Q)luajit runtime/gen/reference.lua manual >$@

# The documents' text, for `perilune help WORDS`.
SEARCHED := README.md $(sort $(wildcard docs/*.md docs/benchmarks/*.md))
DOCUMENTS := $B/lua/perilune/documents.lua
$(DOCUMENTS): $(SEARCHED) runtime/gen/documents.lua | needed
	@mkdir -p $(@D)
	@$(if $(V),,echo '  TEXTS   $@')
	$(Q)luajit runtime/gen/documents.lua $(SEARCHED) >$@

# A file that appears while make runs is older than the pack: the list of names says that there is something to do.
$B/lua.list: needed
	@printf '%s\n' $(LUA) | cmp -s - $@ || printf '%s\n' $(LUA) >$@
$B/pack.c: $(CDEF) $(MANUAL) $(DOCUMENTS) $(LUA) $B/lua.list runtime/gen/pack.lua $(CONFIG)
	@$(if $(V),,echo '  PACK    $@')
	$(Q)luajit runtime/gen/pack.lua $(CDEF) $(MANUAL) $(DOCUMENTS) $(LUA) argparse $(if $(HAVE_DKJSON),dkjson) >$@

$B/obj/pack.o: $B/pack.c runtime/host/host_internal.h
	$(Q)$(CC) -std=c11 -Iruntime -fvisibility=hidden -fPIC -c $< -o $@

# Lua for C programs (perilune/lua.h): the Lua files and what calls LuaJIT, whose shared library the programs have, too.
LUA_SO_OBJ := $B/obj/runtime/host/guest/luajit.o $B/obj/runtime/host/packed.o
$B/obj/runtime/host/guest/luajit.o: EXTRA := $(LUAJIT_CFLAGS)
$(LUA_SO): $(LUA_SO_OBJ) $B/obj/pack.o
	@$(if $(V),,echo '  PLUGIN  $@')
	$(Q)$(CC) $(CFLAGS) $(SANFLAGS) -shared $^ -L$(dir $(firstword $(LUAJIT_LIBS))) -lluajit-5.1 -o $@

LINK_LAUNCHER = $(CC) $(CFLAGS) $(SANFLAGS) -rdynamic $(filter-out $(LIB_A),$^) -Wl,--whole-archive $(LIB_A) $(firstword $(LUAJIT_LIBS)) \
	  -Wl,--no-whole-archive $(wordlist 2,9,$(LUAJIT_LIBS)) $(LIBS) -o $@
$B/perilune: $(HOST_OBJ) $B/obj/pack.o $(LIB_A)
	@$(if $(V),,echo '  LINK    $@')
	$(Q)$(LINK_LAUNCHER)

# -- the server ---------------------------------------------------------------------------------------------------------------------

$B/serve_page.c: runtime/serve/page.html runtime/gen/bytes.lua | needed
	@mkdir -p $(@D)
	$(Q)luajit runtime/gen/bytes.lua peri__serve_page $< >$@
$B/obj/serve_page.o: $B/serve_page.c | needed
	@mkdir -p $(@D)
	$(Q)$(CC) -std=c11 -c $< -o $@
$(SERVE_A): $(SERVE_OBJ)
	@$(if $(V),,echo '  AR      $@')
	$(Q)rm -f $@ && ar crs $@ $^
$(SERVER): $B/obj/runtime/serve/serve_main.o $(SERVE_A) $(LIB_A)
	@$(if $(V),,echo '  LINK    $@')
	$(Q)$(CC) $(CFLAGS) $(SANFLAGS) $^ -lmicrohttpd $(LIBS) -o $@

# -- tests --------------------------------------------------------------------------------------------------------------------------

UNIT := $(if $(HAVE_CMOCKA),$(patsubst %.c,$B/%,$(filter-out $(if $(HAVE_MICROHTTPD),,tests/unit/test_serve%.c) $(if $(LUA_SO),,tests/unit/test_lua.c),$(wildcard tests/unit/*.c tests/kernels/*.c))))
FUZZ := $(patsubst %.c,$B/%,$(wildcard tests/fuzz/*.c))
# Tests of the server have its objects.
$(filter $B/tests/unit/test_serve% $B/tests/fuzz/serve,$(UNIT) $(FUZZ)): $(SERVE_A)
SERVE_LIBS = $(filter $(SERVE_A),$^)
TEST_PLUGINS := $(patsubst tests/unit/plugins/%.c,$B/tests/unit/plugins/libperilune_%.so,$(wildcard tests/unit/plugins/*.c))
TEST_FLAGS := $(PFLAGS) -I. -Wno-missing-prototypes -Wno-conversion -Wno-unused-function

# The library's objects once more, with nothing hidden: see tests/harness/visible.lua.
# malloc's blocks end where a page does (tests/harness/fence.c), so they begin anywhere: no code may count on more.
$(filter $B/tests/kernels/%,$(UNIT)): TEST_FLAGS += -fno-builtin-malloc

TESTS_SO := $B/tests/libperilune_tests.so
$(TESTS_SO): $(OBJ) tests/harness/visible.lua
	@mkdir -p $(@D)
	@$(if $(V),,echo '  LINK    $@')
	$(Q)$(CC) -r -nostdlib $(OBJ) -o $@.o
	$(Q)luajit tests/harness/visible.lua $@.o
	$(Q)$(CC) $(CFLAGS) $(SANFLAGS) -shared -Wl,-Bsymbolic -Wl,-soname,$(@F) $@.o $(LIBS) -o $@
# A program is compiled again when a header that it includes has changed; names are looked up when it starts.
TEST_LIBS = $(SERVE_LIBS) $(or $(UNIT_LIBRARY),$(TESTS_SO)) -Wl,-z,now -Wl,-rpath,'$$ORIGIN/..' $(if $(SERVE_LIBS),-lmicrohttpd) $(LIBS)

# Programs of kernels get a malloc whose blocks end at closed pages; the sanitizers bring their own.
FENCE = $(if $(SAN),,$(filter tests/harness/fence.c,$^))
$(filter $B/tests/kernels/%,$(UNIT)): tests/harness/fence.c
# Lua finds the library's functions in the shared one; the program has LuaJIT for a state of its own.
$B/tests/unit/test_lua: $(LIB_SO) $(LUA_SO)
$B/tests/unit/test_lua: UNIT_LIBRARY := -L$B -Wl,-rpath,$(abspath $B) -lperilune -L$(dir $(firstword $(LUAJIT_LIBS))) -lluajit-5.1
$B/tests/unit/test_lua: TEST_FLAGS += $(LUAJIT_CFLAGS)
# It has all of kernels/cpu/product.c in itself, which takes twice as long to optimise as all else of it.
$B/tests/kernels/test_amx: TEST_FLAGS += -O1
$(UNIT): $B/%: %.c $(CONFIG) | $(TESTS_SO)
	@mkdir -p $(@D)
	@$(if $(V),,echo '  TEST    $<')
	$(Q)$(CC) $(CFLAGS) $(TEST_FLAGS) -MMD -MP -MF $@.d -MT $@ -c $< -o $@.o
	$(Q)$(CC) $(CFLAGS) $(TEST_FLAGS) -rdynamic -Wl,-z,separate-code $@.o $(FENCE) -lcmocka $(TEST_LIBS) -o $@

# Programs in C++: of the pretended GPU.
UNIT_CXX := $(if $(and $(HAVE_CXX),$(HAVE_CMOCKA)),$(patsubst %.cc,$B/%,$(wildcard tests/unit/*.cc)))
UNIT_CXX_OBJ := $(patsubst %,$B/cuda_host/tests/cuda_host/%.o,device memory places threads) $B/cuda_host/$(if $(SAN),,races/)tests/cuda_host/races.o
$(UNIT_CXX): $B/%: %.cc $(UNIT_CXX_OBJ)
	@mkdir -p $(@D)
	@$(if $(V),,echo '  TEST    $<')
	$(Q)$(CXX) $(CU_HOST_FLAGS) $(if $(SAN),,$(RACES_FLAGS)) -MMD -MP -MF $@.d -c $< -o $@.o && $(CXX) $(SANFLAGS) $@.o $(UNIT_CXX_OBJ) -lcmocka -lpthread -ldl -o $@

$(FUZZ): $B/%: %.c tests/harness/fuzz_main.c $(CONFIG) | $(TESTS_SO)
	@mkdir -p $(@D)
	@$(if $(V),,echo '  FUZZ    $<')
	$(Q)$(CC) $(CFLAGS) $(TEST_FLAGS) -MMD -MP -MF $@.d -MT $@ -c $< -o $@.o
	$(Q)$(CC) $(CFLAGS) $(TEST_FLAGS) $@.o tests/harness/fuzz_main.c $(TEST_LIBS) -o $@

$(TEST_PLUGINS): $B/tests/unit/plugins/libperilune_%.so: tests/unit/plugins/%.c $(CONFIG) | needed
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(TEST_FLAGS) -MMD -MP -MF $@.d -shared $< -o $@

PRELOAD := $(if $(filter address thread,$(SAN)),$(shell $(CC) -print-file-name=lib$(if $(filter address,$(SAN)),asan,tsan).so):$(CURDIR)/$B/libperilune.so)
RUN_TESTS = luajit tests/run.lua --build=$B --san=$(SAN) --preload=$(PRELOAD) --mpi='$(HAVE_MPI)' --busted='$(HAVE_BUSTED)' --cmocka='$(HAVE_CMOCKA)' \
	--luacheck='$(HAVE_LUACHECK)' --seed=$(SEED) --only='$(ONLY)'
# Recipes that call it begin with a plus: make gives its jobs only to a recipe that it knows to call make, and the name hides that.
# Such a recipe runs under -n, too (and the make in it then only prints): it may do nothing else.
SUBMAKE = $(MAKE) --no-print-directory $(if $(findstring -j,$(MAKEFLAGS)),,-j$(CORES))

test:
	+@$(SUBMAKE) setup
	+@$(SUBMAKE) check

PROGRAMS := $(UNIT) $(UNIT_CXX) $(TEST_PLUGINS) $(FUZZ) $(CUDA_HOST) $(NCCL_HOST) $(CU_SEEN)
check: all $(PROGRAMS)
	@$(RUN_TESTS)
check-c: all $(PROGRAMS)
	@$(RUN_TESTS) --parts=c,fuzz
check-lua: all $(CUDA_HOST)
	@$(RUN_TESTS) --parts=lua
# For people: other inputs every time. `make check` makes the same ones every time.
fuzz: all $(FUZZ)
	@$(RUN_TESTS) --parts=fuzz --fuzz-seconds=$(or $(SECONDS),60)
# Everything that runs on the device opaque, on kernels/cuda compiled for the host instead; `check` runs the kernels' own cases on them.
check-cuda: all $(UNIT) $(UNIT_CXX) $(TEST_PLUGINS) $(CUDA_HOST) $(RACES) $(NCCL_HOST)
	@$(RUN_TESTS) --parts=cuda
# Its short specs, under the sanitizers of addresses and of undefined behaviour.
check-cuda-san:
	+@for san in address undefined; do $(SUBMAKE) check-cuda-short SAN=$$san || exit 1; done
check-cuda-short: all $(CUDA_HOST)
	@$(RUN_TESTS) --parts=cuda-short
# On a machine with a GPU: parts with a deadline each (tests/gpu/check.lua). PARTS="device families": only these. MOST=60: no part takes
# longer. GPU=cuda_host: the same on the pretended one.
GPU ?= cuda
CUDA_KERNELS := $B/cuda/libperilune_cuda_kernels.so
$(CUDA_KERNELS): $(CU:%.cu=$B/cuda/%.o) $B/cuda/kernels/cuda/table.o $B/cuda/tests/cuda_host/kernels.o
	@$(if $(V),,echo '  PLUGIN  $@')
	$(Q)$(NVCC) -shared -Xlinker -z,defs -cudart static $^ -L$(CUDA_HOME)/lib64 -lcublasLt -o $@
$B/cuda/tests/cuda_host/kernels.o: EXTRA := -I.
gpu-check:
	+@$(SUBMAKE) setup
	@luajit tests/gpu/driver.lua '$(GPU)'
	+@$(SUBMAKE) gpu-check-run GPU=$(GPU) PARTS='$(PARTS)' MOST='$(MOST)'
gpu-check-run: all $(UNIT) $(TEST_PLUGINS) $(if $(filter cuda_host,$(GPU)),$(CUDA_HOST) $(NCCL_HOST),$(CUDA_SO) $(NCCL_SO) $(CUDA_KERNELS))
	@luajit tests/gpu/check.lua --build=$B --device=$(GPU) --mpi='$(HAVE_MPI)' --busted='$(HAVE_BUSTED)' --cmocka='$(HAVE_CMOCKA)' --only='$(ONLY)' \
	  --parts='$(PARTS)' --most='$(MOST)' --kernels=$(if $(filter cuda_host,$(GPU)),$(CUDA_HOST),$(CUDA_KERNELS)) --sanitizer=$(firstword $(wildcard $(CUDA_HOME)/bin/compute-sanitizer))
# Programs under a sanitizer, of the library in two files with the scalar kernels, which compiles in a minute. sanitized(compiler, folder,
# programs): compiles tests/PROGRAM.c, with the server's files where it has serve in its name. The server itself, beside the launcher that calls it.
SANITIZED = mkdir -p $2 && $1 -c $B/amalgamation/perilune.c -o $2/perilune.o && \
	for test in $3; do $1 tests/$$test.c $2/perilune.o $$(case $$test in fuzz/*) echo tests/harness/fuzz_main.c ;; esac) \
	  $$(case $$test in *serve*) echo $(filter-out %/serve_main.c,$(wildcard runtime/serve/*.c)) $B/obj/serve_page.o -lmicrohttpd ;; esac) \
	  -o $2/$$(basename $$test) -lcmocka -lxxhash -lpthread -ldl -lm || exit 1; done
SANITIZED_SERVER = $1 runtime/serve/*.c $B/obj/serve_page.o $2/perilune.o -o $2/perilune-serve -lmicrohttpd -lxxhash -lpthread -ldl -lm && \
	cp $(LAUNCHER) $2/perilune
# Under the thread sanitizer: threads on one table, for SECONDS=20; a random program of several threads; threads that ask one model; the server, and one that follows a trainer while two
# clients ask as fast as they can. Then states of Lua in several threads, without it.
RACES := $B/amalgamation/races
TWO_FILES_CC := $(CC) -std=gnu11 -D_GNU_SOURCE -O1 -g1 -DPERI_ISA_MOST=0 -Iruntime/include -I.
RACES_CC := $(TWO_FILES_CC) -fsanitize=thread
stress: all amalgamation $B/tests/unit/test_lua
	$(call SANITIZED,$(RACES_CC),$(RACES),unit/test_stress unit/test_host_random unit/test_model $(if $(SERVER),unit/test_serve unit/test_serve_load))
	for test in $(RACES)/test_*; do PERI_STRESS=$(or $(SECONDS),20) $$test || exit 1; done
ifneq ($(SERVER),)
	$(call SANITIZED_SERVER,$(RACES_CC),$(RACES))
	PERI_SERVE_PROGRAM=$(RACES)/perilune luajit tests/fuzz/serving.lua load 100 10
endif
	for round in 1 2 3 4 5; do $B/tests/unit/test_lua >$B/stress.log 2>&1 || { cat $B/stress.log; exit 1; }; done
# Under the sanitizers of addresses and of undefined behaviour: any bytes as model files and as requests, for SECONDS=60 each; the tests of
# both; a server that follows a trainer while two clients ask as fast as they can.
ADDRESSES := $B/amalgamation/addresses
ADDRESSES_CC := $(TWO_FILES_CC) -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
fuzz-model: all amalgamation
	$(call SANITIZED,$(ADDRESSES_CC),$(ADDRESSES),fuzz/model unit/test_model $(if $(SERVER),fuzz/serve unit/test_serve unit/test_serve_load unit/test_serve_read))
	for test in $(ADDRESSES)/test_*; do $$test || exit 1; done
	for test in model $(if $(SERVER),serve); do $(ADDRESSES)/$$test $(or $(SECONDS),60)s $(or $(SEED),$$(date +%s)) || exit 1; done
ifneq ($(SERVER),)
	$(call SANITIZED_SERVER,$(ADDRESSES_CC),$(ADDRESSES))
	PERI_SERVE_PROGRAM=$(ADDRESSES)/perilune luajit tests/fuzz/serving.lua load 100 10
endif
check-mpi: all $(CUDA_HOST) $(NCCL_HOST)
	@$(RUN_TESTS) --parts=mpi
# Every spec that runs under mpirun -n 4, on pretended machines; `check` runs a short list of them there.
check-net: all
	@$(RUN_TESTS) --parts=all-net
# Processes that save are killed at random moments, one rank or all: full checkpoints, increments, behind the training, compacting.
check-kills: all
	@for spec in chain_kill kill; do PERI_BUILD=$B PERI_TEST_KILLS=$(or $(KILLS),200) luajit tests/harness/busted_main.lua \
	  --output=tests/harness/busted_report.lua --seed=$(or $(SEED),1) spec/checkpoint/$${spec}_spec.lua || exit 1; done
# The pictures of the documents, docs/pictures: ONLY=pattern makes those whose names it matches.
pictures: all
	@$(if $(LAUNCHER),luajit tests/pictures/make.lua --perilune=$(LAUNCHER) --only='$(ONLY)',echo 'pictures: they need the launcher: make setup' >&2; exit 1)
# docs/parity.md, of the names in tests/parity.
parity:
	@luajit tests/parity/page.lua
# docs/reference, of lua/perilune/reference and the headers.
reference: all
	@mkdir -p docs/reference && luajit runtime/gen/reference.lua pages docs/reference
lint: all
	@$(RUN_TESTS) --parts=lint

-include $(UNIT:=.d) $(UNIT_CXX:=.d) $(FUZZ:=.d) $(TEST_PLUGINS:=.d)
-include $(OBJ:.o=.d) $(HOST_OBJ:.o=.d) $(LUA_SO_OBJ:.o=.d) $(PLUGIN_OBJ:.o=.d) $(SERVE_OBJ:.o=.d) $B/obj/runtime/serve/serve_main.d

# -- the demonstration and the benchmarks ----------------------------------------------------------------------------------------------

# DEVICE=cuda trains on GPUs, one rank each unless RANKS says otherwise, DEVICE=cuda:1 on that one; DEVICE=cuda_host on a pretended one: slow, for those without.
DEVICE ?=
ON_GPU := $(filter cuda cuda:%,$(DEVICE))
GPUS = $(or $(shell luajit tests/gpu/driver.lua count 2>/dev/null),0)
RANKS ?= $(if $(filter cuda,$(DEVICE)),$(if $(filter-out 0,$(GPUS)),$(GPUS),1),$(if $(filter cuda_host cuda:%,$(DEVICE)),1,2))
DEMO_PLUGINS := $(if $(ON_GPU),$(if $(HAVE_CUDA),$(CUDA_SO) $(NCCL_SO)),$(if $(filter cuda_host,$(DEVICE)),$(CUDA_HOST) $(NCCL_HOST)))
DATA ?=
STEPS ?=
PLAN ?=
SCHEDULE ?=
CHECKPOINT ?=
EVERY ?= $(if $(PERI_CHECKPOINT_EVERY),,10s)
FULL_EVERY ?=
KEEP ?=
ASYNC ?=
# Without Open MPI there is one rank; the runner says so.
WORLD = $(if $(HAVE_MPI),$(call quoted,$(or $(strip $(RANKS)),2)),1)
# One word of the shell.
quoted = '$(subst ','\'',$(1))'

demo:
	+@$(SUBMAKE) setup SETUP_FOR=$(if $(DATA),,demo)
	@$(if $(ON_GPU),luajit tests/gpu/driver.lua $(call quoted,$(DEVICE)) demo,:)
	+@$(SUBMAKE) demo-run

# The demonstration's model as a file, behind HTTP, and its trainer goes on: examples/serve_demo.sh.
demo-serve:
	+@$(SUBMAKE) setup SETUP_FOR=$(if $(DATA),,demo)
	+@$(SUBMAKE) demo-serve-run
demo-serve-run: all
	@$(if $(LAUNCHER),:,echo 'perilune: the demonstration needs the launcher (libluajit and argparse): make setup' >&2; exit 1)
	@examples/serve_demo.sh $(LAUNCHER) build/demo-serve $(WORLD) $(if $(DATA),--data $(call quoted,$(DATA))) $(ARGS)

demo-run: all $(DEMO_PLUGINS)
	@$(if $(ON_GPU),$(if $(HAVE_CUDA),:,echo 'perilune: DEVICE=$(DEVICE) needs the CUDA Toolkit, and nvcc was not found; install it, then: make probe' >&2; exit 1),:)
	@$(if $(LAUNCHER),:,echo 'perilune: the demonstration needs the launcher (libluajit and argparse): make setup' >&2; exit 1)
	@$(if $(HAVE_MPI),:,echo 'perilune: Open MPI was not found, so there is one rank')
	@$(if $(DEVICE),:,[ $(GPUS) = 0 ] || echo 'perilune: this machine has a GPU; make demo DEVICE=cuda trains on it$(if $(HAVE_CUDA),, (with the CUDA Toolkit: nvcc))')
	@mkdir -p build/demo
	@$(if $(filter cuda_host,$(DEVICE)),PERI_PLUGIN_PATH=$(abspath $B/cuda_host):$(abspath $B)) $(LAUNCHER) run -n $(WORLD) \
	  $(if $(CHECKPOINT),--checkpoint $(call quoted,$(CHECKPOINT)) $(if $(EVERY),--every $(call quoted,$(EVERY))) \
	  $(if $(FULL_EVERY),--full-every $(call quoted,$(FULL_EVERY))) $(if $(KEEP),--keep $(call quoted,$(KEEP))) $(if $(filter-out 0,$(ASYNC)),--async)) examples/dlrm.lua --out build/demo \
	  $(if $(DEVICE),--device $(call quoted,$(DEVICE))) $(if $(STEPS),--steps $(call quoted,$(STEPS))) \
	  $(if $(PLAN),--plan $(call quoted,$(PLAN))) $(if $(DATA),--data $(call quoted,$(DATA))) \
	  $(if $(SCHEDULE),--schedule $(call quoted,$(SCHEDULE))) $(ARGS)

# tests/bench/<name>.lua prints its lines and appends one JSON object each to --out; bench-comm and bench-step run at several sizes.
BENCH = @mkdir -p build/bench && rm -f build/bench/$(1).jsonl && for ranks in $(2); do \
	$(or $(TIMED),$(LAUNCHER)) run -n $$ranks $(3) tests/bench/$(1).lua --out build/bench/$(1).jsonl $(4) $(ARGS) || exit 1; done

# PYTHON= a Python with torch, torchrec and fbgemm_gpu: runs the same step under them too (bench-step, bench-pipeline), their kernels on the same ids
# (bench-embed), their exchange of KeyedJaggedTensors (bench-comm), unsharded collections of sequences (bench-shard),
# or torch.distributed.checkpoint (bench-checkpoint).
PYTHON ?=
# How PYTHON is called: with FBGEMM told what the processor has, or else it would run its reference code.
PEER := $(if $(PYTHON),$B/bench/python)
$B/bench/libfbgemm_isa.so: tests/bench/peers/fbgemm_isa.c $(CONFIG)
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) -std=c11 $(WARN) -fPIC -shared $< -o $@
.PHONY: $B/bench/python
$B/bench/python: $B/bench/libfbgemm_isa.so
	@printf '%s\n' '#!/bin/sh' 'LD_PRELOAD="$(abspath $<)" exec "$(PYTHON)" "$$@"' >$@ && chmod +x $@
bench-step: all $(PEER)
	$(call BENCH,step,1 $(if $(HAVE_MPI),2),-t 1)
	@$(if $(PYTHON),$(PEER) tests/bench/peers/step.py --perilune $(LAUNCHER) --out build/bench/step.jsonl)
# The bare Open MPI calls that bench-comm compares with.
$B/bench/libcomm_mpi.so: tests/bench/comm_mpi.c $(CONFIG)
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(PFLAGS) -Wno-unused-parameter $(MPI_CFLAGS) -fvisibility=default -shared $< $(MPI_LIBS) -o $@
bench-comm: all $(PEER) $(if $(HAVE_MPI),$B/bench/libcomm_mpi.so)
	$(call BENCH,comm,$(if $(HAVE_MPI),2 4,1))
	@$(if $(and $(PYTHON),$(HAVE_MPI)),$(PEER) tests/bench/peers/kjt.py --perilune $(LAUNCHER) --out build/bench/comm.jsonl)
# Model files last: a guest that gives gigabytes back to its host is slow for seconds, which lookups of 1 us and the tail of HTTP would show.
bench-serve: all $(PEER) $B/bench/lookup $B/bench/http $(if $(SERVER),$B/bench/http_bare)
	@mkdir -p build/bench && rm -f build/bench/serve_first.jsonl
	$(if $(SERVER),@PERI_BUILD=$B $(LAUNCHER) run tests/bench/http.lua $B/bench/http build/bench/serve_first.jsonl $B/bench/http_bare)
	@$B/bench/lookup build/bench/serve_first.jsonl 1 2 4 $(filter-out 1 2 4,$(CORES))
	$(if $(SERVER),@PERI_BUILD=$B $(LAUNCHER) run tests/bench/follow.lua $B/bench/http build/bench/serve_first.jsonl)
	$(call BENCH,serve,1,,$(if $(PYTHON),--python $(PEER)))
	@cat build/bench/serve_first.jsonl >> build/bench/serve.jsonl && rm build/bench/serve_first.jsonl
$B/bench/http: tests/bench/http.c
	@mkdir -p $(@D)
	$(Q)$(CC) -std=c11 -D_GNU_SOURCE -O2 $(WARN) $< -o $@
$B/bench/http_bare: tests/bench/http_bare.c
	@mkdir -p $(@D)
	$(Q)$(CC) -std=c11 -D_GNU_SOURCE -O2 $(WARN) $< -lmicrohttpd -o $@
$B/bench/lookup: tests/bench/lookup.c $(LIB_A)
	@mkdir -p $(@D)
	$(Q)$(CC) -std=c11 -D_GNU_SOURCE -O2 $(WARN) -Iruntime/include $^ $(LIBS) -o $@
bench-embed: all $(PEER) $B/tests/bench/libroofline.so
	$(call BENCH,embed,1,,--roofline $B/tests/bench/libroofline.so $(if $(PYTHON),--python $(PEER)))
$B/tests/bench/libroofline.so: tests/bench/roofline.c tests/bench/sort.c $(LIB_A)
	@mkdir -p $(@D)
	$(Q)$(CC) -std=c11 -D_GNU_SOURCE -O3 -march=native -fPIC -shared -fvisibility=hidden -I. -Iruntime/include $(WARN) $(filter %.c,$^) \
		$(LIB_A) $(LIBS) -o $@
bench-sparse: all $(PEER)
	$(call BENCH,sparse,1,,$(if $(PYTHON),--python $(PEER)))
bench-retrieval: all
	$(call BENCH,retrieval,1,,$(if $(PYTHON),--python $(PYTHON)))
bench-tiers: all
	$(call BENCH,tiers,1)
bench-checkpoint: all
	$(call BENCH,checkpoint,1 $(if $(HAVE_MPI),2))
	@$(if $(PYTHON),$(PYTHON) tests/bench/peers/checkpoint.py --out build/bench/checkpoint.jsonl $(ARGS))
bench-data: all
	$(call BENCH,data,1)
bench-dense: all
	$(call BENCH,dense,1,-t 1)
# By a launcher that counts the time of the kernels: tests/bench/kernel_time.c.
bench-calls: TIMED := $B/tests/bench/perilune
bench-calls: all $B/tests/bench/perilune
	$(call BENCH,calls,1,-t 1)
$B/tests/bench/perilune: $(HOST_OBJ) $B/obj/pack.o $B/obj/tests/bench/kernel_time.o $(LIB_A)
	@mkdir -p $(@D)
	$(Q)$(LINK_LAUNCHER) -Wl,--wrap=peri__cpu_entry
bench-shard: all $(PEER)
	$(call BENCH,shard,$(if $(HAVE_MPI),2 4,1))
	@$(if $(PYTHON),$(PEER) tests/bench/peers/sequence.py --perilune $(LAUNCHER) --out build/bench/shard.jsonl)
bench-collision: all $(PEER) $B/tests/bench/libfind.so
	$(call BENCH,collision,1,,--find $B/tests/bench/libfind.so $(if $(PYTHON),--python $(PEER)))
	$(if $(HAVE_MPI),$(LAUNCHER) run -n 2 -t 1 tests/bench/collision_ranks.lua --out build/bench/collision.jsonl)
$B/tests/bench/libfind.so: tests/bench/find.c $(CONFIG)
	@mkdir -p $(@D)
	$(Q)$(CC) -std=c11 -D_GNU_SOURCE -O3 -march=native -fPIC -shared -fvisibility=hidden -Wno-missing-prototypes $< -lpthread -o $@
bench-routes: all
	$(call BENCH,routes,1,-t 1)
# On 2 ranks here, and on 2 machines of one rank each, joined by slower links; then tables in files, on one rank that leaves a core free.
PIPELINE_LINKS ?= 10gbit 1gbit
bench-pipeline: all $(PEER)
	$(call BENCH,pipeline,$(if $(HAVE_MPI),2,1),-t 1)
	@for rate in $(if $(HAVE_MPI),$(PIPELINE_LINKS)); do \
	  PERI_BUILD=$B tests/net/nodes -r $$rate 1,1 true || { echo "bench-pipeline: $$rate: skipped"; break; }; \
	  PERI_BUILD=$B tests/net/nodes -r $$rate 1,1 $(LAUNCHER) run -n 2 -t 1 tests/bench/pipeline.lua --link $$rate --out build/bench/pipeline.jsonl \
	    $(ARGS) || exit 1; done
	@$(LAUNCHER) run -n 1 -t 1 tests/bench/pipeline.lua --cache 0.2 --schedules sparse_dist,prefetch_sparse_dist --out build/bench/pipeline.jsonl $(ARGS)
	@$(if $(PYTHON),$(PEER) tests/bench/peers/pipeline.py --perilune $(LAUNCHER) --out build/bench/pipeline.jsonl)
MACHINES ?= 2,2
RATE ?= 1gbit
comma := ,
bench-net: all
	@mkdir -p build/bench && rm -f build/bench/net.jsonl
	@PERI_BUILD=$B tests/net/nodes -r $(RATE) $(MACHINES) $(LAUNCHER) run -n $$(($(subst $(comma),+,$(MACHINES)))) -t 1 tests/bench/net.lua \
	  --out build/bench/net.jsonl $(ARGS)
# Plans: on 1, 2 and 4 ranks, and as root on two pretended machines of two. Each is calibrated first.
bench-plan: all
	@mkdir -p build/bench && rm -f build/bench/plan.jsonl
	@for ranks in 1 $(if $(HAVE_MPI),2 4); do \
	  $(LAUNCHER) run -n $$ranks -t 1 tests/bench/plan.lua --topology build/bench/plan-$$ranks.topology --out build/bench/plan.jsonl $(ARGS) \
	  || exit 1; done
	@$(if $(and $(HAVE_MPI),$(HAVE_IP)),PERI_BUILD=$B tests/net/nodes -r 1gbit 2$(comma)2 $(LAUNCHER) run -n 4 -t 1 tests/bench/plan.lua \
	  --topology build/bench/plan-far.topology --out build/bench/plan.jsonl $(ARGS) || [ $$? = 125 ])
bench: bench-embed bench-tiers bench-sparse bench-comm bench-step bench-data bench-dense bench-calls bench-routes bench-shard bench-collision \
	bench-pipeline bench-plan bench-checkpoint bench-serve

# -- installing -------------------------------------------------------------------------------------------------------------------------

# Everything that is installed, below $(DESTDIR). Documents keep their places relative to each other and
# to the examples, so that links lead there; headers name files among them.
LUADIR := $(PREFIX)/share/lua/5.1
SHARE := $(PREFIX)/share/perilune
DOCS := README.md LICENSE $(sort $(shell find docs -type f)) $(sort $(wildcard kernels/*.h))
EXAMPLES := $(sort $(shell find examples -type f))
DOCDIR := $(PREFIX)/share/doc/perilune
COMPLETIONS := $(PREFIX)/share/bash-completion/completions/perilune $(PREFIX)/share/zsh/site-functions/_perilune
BUILT_PLUGINS := $(PLUGINS) $(LUA_SO) $(wildcard $(CUDA_SO) $(NCCL_SO))
INSTALLED := $(HEADERS:runtime/include/%=$(PREFIX)/include/%) $(LIBDIR)/libperilune.a $(LIBDIR)/libperilune.so.$(VERSION) \
	$(LIBDIR)/libperilune.so.$(SOVERSION) $(LIBDIR)/libperilune.so $(LIBDIR)/pkgconfig/perilune.pc \
	$(BUILT_PLUGINS:$B/%=$(LIBDIR)/perilune/%) $(LUA:lua/%=$(LUADIR)/%) $(DEFINITIONS:lua/%=$(LUADIR)/%) $(LUADIR)/perilune/cdef.lua $(LAUNCHER:$B/%=$(PREFIX)/bin/%) $(if $(LAUNCHER),$(COMPLETIONS)) \
	$(DOCS:%=$(DOCDIR)/%) $(EXAMPLES:%=$(SHARE)/%) $(DOCDIR)/examples
INSTALLED += $(if $(LAUNCHER),$(SERVER:$B/%=$(PREFIX)/bin/%))

$B/perilune.pc: $(CONFIG) Makefile
	@mkdir -p $(@D)
	@printf '%s\n' 'prefix=@PREFIX@' 'libdir=@LIBDIR@' 'includedir=$${prefix}/include' 'plugindir=$${libdir}/perilune' '' 'Name: perilune' \
	  'Description: sharded embeddings and training of recommendation models' 'Version: $(VERSION)' 'Cflags: -I$${includedir}' \
	  'Libs: -L$${libdir} -lperilune' 'Libs.private: $(LIBS)' >$@

# Install files $(1), each at its place in the tree without the first folder $(2), below $(DESTDIR)$(3): one call for each folder, since a
# call for each file takes a second of a processor.
install_tree = $(foreach d,$(sort $(dir $(1))),install -m 644 $(foreach f,$(1),$(if $(filter $d,$(dir $f)),$f)) $(DESTDIR)$(3)/$(d:$(2)%=%) || exit 1;)
# Folders that did not exist are noted in $(SHARE)/folders, so that `uninstall` takes just those away again.
install: all $B/perilune.pc
	@sh runtime/gen/folders.sh make '$(DESTDIR)' $(SHARE)/folders $(sort $(dir $(INSTALLED)))
	@install -m 644 $(HEADERS) $(DESTDIR)$(PREFIX)/include/perilune/
	@install -m 644 $(LIB_A) $(DESTDIR)$(LIBDIR)/
	@install -m 755 $(LIB_SO) $(DESTDIR)$(LIBDIR)/
	@ln -sf $(notdir $(LIB_SO)) $(DESTDIR)$(LIBDIR)/libperilune.so.$(SOVERSION)
	@ln -sf libperilune.so.$(SOVERSION) $(DESTDIR)$(LIBDIR)/libperilune.so
	@sed 's|@PREFIX@|$(PREFIX)|; s|@LIBDIR@|$(LIBDIR)|' $B/perilune.pc >$(DESTDIR)$(LIBDIR)/pkgconfig/perilune.pc
	@$(if $(BUILT_PLUGINS),install -m 755 $(BUILT_PLUGINS) $(DESTDIR)$(LIBDIR)/perilune/)
	@$(call install_tree,$(LUA) $(DEFINITIONS),lua/,$(LUADIR))
	@install -m 644 $(CDEF) $(DESTDIR)$(LUADIR)/perilune/
	@$(if $(LAUNCHER),install -m 755 $(LAUNCHER) $(SERVER) $(DESTDIR)$(PREFIX)/bin/)
	@$(if $(LAUNCHER),$(LAUNCHER) completion bash >$(DESTDIR)$(word 1,$(COMPLETIONS)) && $(LAUNCHER) completion zsh >$(DESTDIR)$(word 2,$(COMPLETIONS)))
	@$(call install_tree,$(DOCS),,$(DOCDIR))
	@$(call install_tree,$(EXAMPLES),,$(SHARE))
	@ln -sfn ../../perilune/examples $(DESTDIR)$(DOCDIR)/examples
	@$(if $(DESTDIR),:,ldconfig 2>/dev/null || true)
	@echo 'perilune $(VERSION) is installed in $(DESTDIR)$(PREFIX)'
	@echo '  examples: $(SHARE)/examples   documents: $(DOCDIR)'
	@$(if $(LAUNCHER),:,echo 'perilune: without the launcher, `perilune`: $(if $(HAVE_ARGPARSE),,lua-argparse )$(if $(HAVE_LUAJIT_LIB),,libluajit )was not found. Run: make setup install')
	@$(if $(HAVE_DKJSON),:,echo 'perilune: without logs: lua-dkjson was not found. Run: make setup install')

uninstall:
	@rm -f $(addprefix $(DESTDIR),$(INSTALLED))
	@sh runtime/gen/folders.sh remove '$(DESTDIR)' $(SHARE)/folders
	@echo 'perilune is gone from $(DESTDIR)$(PREFIX)'

clean:
	rm -rf $(filter-out $(CONFIG),$(wildcard build/*))

distclean:
	rm -rf build
