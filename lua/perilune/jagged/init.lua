-- jagged: key lists, JaggedTensor, KeyedJaggedTensor, KeyedTensor, and the sparse operators.
return {
  Keys = require "perilune.jagged.keys",
  JaggedTensor = require "perilune.jagged.jt",
  KeyedJaggedTensor = require "perilune.jagged.kjt",
}
