-- jagged: key lists, JaggedTensor, KeyedJaggedTensor, KeyedTensor.
local JaggedTensor = require "perilune.jagged.jt"
local KeyedJaggedTensor = require "perilune.jagged.kjt"
local KeyedTensor = require "perilune.jagged.kt"

return {
  Keys = require "perilune.jagged.keys",
  JaggedTensor = JaggedTensor,
  KeyedJaggedTensor = KeyedJaggedTensor,
  KeyedTensor = KeyedTensor,
  KTRegroupAsDict = KeyedTensor.KTRegroupAsDict,
  jt_is_equal = JaggedTensor.methods.equal,
  kjt_is_equal = KeyedJaggedTensor.methods.equal,
}
