-- jagged: key lists, JaggedTensor, KeyedJaggedTensor, KeyedTensor.
local util = require "perilune.util"
local JaggedTensor = require "perilune.jagged.jt"
local KeyedJaggedTensor = require "perilune.jagged.kjt"
local KeyedTensor = require "perilune.jagged.kt"

return util.face("peri.jagged", {
  Keys = require "perilune.jagged.keys",
  JaggedTensor = JaggedTensor,
  KeyedJaggedTensor = KeyedJaggedTensor,
  KeyedTensor = KeyedTensor,
  KTRegroupAsDict = KeyedTensor.KTRegroupAsDict,
  jt_is_equal = JaggedTensor.methods.equal,
  kjt_is_equal = KeyedJaggedTensor.methods.equal,
})
