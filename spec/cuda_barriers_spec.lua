-- Barriers of the block that only some threads may come to: in the PTX that nvcc makes of kernels/cuda there are none
-- (tests/cuda/barriers.lua). deadline: 240 s
-- takes: 15 s
local barriers = require "tests.cuda.barriers"
local build = os.getenv "PERI_BUILD" or "build"

--- A kernel of these instructions.
local function kernel(code) return ".visible .entry kernel(\n\t.param .u64 p\n)\n{\n" .. code .. "\n}\n" end
local function found(code)
  local list = barriers.of(kernel(code))
  return #list
end

describe("barriers that only some threads come to", function()
  it("are found on both sides of a branch, as masked selection had them", function()
    assert.equal(2, found [[
  mov.u32   %r1, %tid.x;
  mul.wide.u32   %rd2, %r1, 1;
  ld.param.u64   %rd1, [p];
  add.s64   %rd3, %rd1, %rd2;
  ld.global.u8   %rs1, [%rd3];
  setp.eq.s16   %p1, %rs1, 0;
  @%p1 bra   $L__BB0_2;
  bar.sync   0;
  bra.uni   $L__BB0_3;
$L__BB0_2:
  bar.sync   0;
$L__BB0_3:
  ret;]])
  end)
  it("are found in loops that threads leave at different times, and behind a return of some", function()
    assert.equal(1, found [[
  mov.u32   %r1, %tid.x;
$L__BB0_1:
  bar.sync   0;
  add.s32   %r1, %r1, 256;
  setp.lt.s32   %p1, %r1, 1000;
  @%p1 bra   $L__BB0_1;
  ret;]])
    assert.equal(1, found [[
  mov.u32   %r1, %laneid;
  setp.gt.s32   %p1, %r1, 10;
  @%p1 bra   $L__BB0_2;
  barrier.sync   0;
$L__BB0_2:
  ret;]])
  end)
  it("are found where a value was chosen by a thread's own branch, by a vote, or by an atomic operation", function()
    for _, first in ipairs { "atom.global.add.u32 \t%r2, [%rd1], 1;", "vote.sync.ballot.b32 \t%r2, %p9, -1;",
      "shfl.sync.up.b32 \t%r2|%p9, %r3, %r4, 0, -1;" } do
      assert.equal(1, found(first .. "\n" .. [[
  setp.eq.s32   %p1, %r2, 0;
  @%p1 bra   $L__BB0_2;
  bar.sync   0;
$L__BB0_2:
  ret;]]), first)
    end
    assert.equal(1, found [[
  mov.u32   %r1, %tid.x;
  mov.u32   %r2, 1;
  setp.eq.s32   %p1, %r1, 0;
  @%p1 bra   $L__BB0_2;
  mov.u32   %r2, 0;
$L__BB0_2:
  setp.eq.s32   %p2, %r2, 0;
  @%p2 bra   $L__BB0_3;
  bar.sync   0;
$L__BB0_3:
  ret;]])
  end)
  it("are found in functions that are called, and where their parameters and results differ", function()
    --- A kernel whose threads call a function with @value, @unless a condition sends them past it; the function waits
    --- @before or @behind a branch that its parameter decides.
    local function calls(value, before, behind, unless)
      local text = ([[
.func (.param .b32 func_retval0) waits(
  .param .b32 waits_param_0
)
{
  ld.param.u32   %%r1, [waits_param_0];
  setp.eq.s32   %%p1, %%r1, 0;
  %s
  @%%p1 bra   $L__BB1_2;
  %s
$L__BB1_2:
  st.param.b32   [func_retval0+0], %%r1;
  ret;
}
]]):format(before, behind) .. kernel(([[
  mov.u32   %%r1, %s;
  setp.eq.s32   %%p2, %%tid.x, 0;
  %s
  { // callseq 0, 0
  .param .b32 param0;
  st.param.b32   [param0+0], %%r1;
  .param .b32 retval0;
  call.uni (retval0),
  waits,
  (
  param0
  );
  ld.param.b32   %%r2, [retval0+0];
  } // callseq 0
$L__BB0_9:
  ret;]]):format(value, unless or ""))
      local list = barriers.of(text)
      return #list, list[1] and list[1].kernel
    end
    local wait = "bar.sync   0;"
    assert.same({ 1, "waits" }, { calls("%tid.x", "", wait) })
    assert.equal(0, (calls("%tid.x", wait, "")))
    assert.equal(0, (calls("%ctaid.x", "", wait)))
    assert.same({ 1, "kernel" }, { calls("%ctaid.x", wait, "", "@%p2 bra   $L__BB0_9;") })
    assert.equal(1, found [[
  call.uni (retval0), __clz, (param0);
  ld.param.b32   %r2, [retval0+0];
  setp.eq.s32   %p1, %r2, 0;
  @%p1 bar.sync   0;
  ret;]])
  end)
  it("are none where all threads take the same way", function()
    assert.equal(0, found [[
  mov.u32   %r1, %tid.x;
  mov.u32   %r2, %ctaid.x;
  ld.param.u32   %r3, [p];
  setp.ge.u32   %p1, %r2, %r3;
  @%p1 bra   $L__BB0_9;
  setp.eq.s32   %p2, %r1, 0;
  @%p2 bra   $L__BB0_2;
  st.shared.u32   [sums], %r1;
$L__BB0_2:
  bar.sync   0;
  ld.shared.v2.u32   {%r4, %r5}, [sums];
  setp.eq.s32   %p3, %r4, 0;
  @%p3 bra   $L__BB0_4;
  bar.red.popc.u32   %r6, 0, %p2;
  setp.eq.s32   %p4, %r6, 5;
  @%p4 bra   $L__BB0_4;
  mov.u32   %r7, %tid.x;
  mov.u32   %r7, 0;
  setp.eq.s32   %p5, %r7, 1;
  @%p5 bra   $L__BB0_4;
  bar.sync   0;
$L__BB0_4:
  bar.warp.sync   -1;
$L__BB0_9:
  ret;]])
  end)
  it("are none in kernels/cuda", function()
    local pipe = assert(io.popen(("ls %s/cuda/kernels/cuda/*.ptx 2>/dev/null"):format(build)))
    local count, wrong = 0, {}
    for path in pipe:lines() do
      local file = assert(io.open(path))
      local list, here = barriers.of(file:read "*a")
      file:close()
      count = count + here
      for _, f in ipairs(list) do
        wrong[#wrong + 1] = ("%s:%d: a barrier of %s that only some threads come to: see the branch of line %d"):format(
          path, f.line, f.kernel, f.branch)
      end
    end
    pipe:close()
    if count == 0 then return pending "nvcc was not found: there is no PTX" end
    assert.equal("", table.concat(wrong, "\n"))
  end)
end)
