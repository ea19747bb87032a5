-- jagged: key lists, JaggedTensor, KeyedJaggedTensor, KeyedTensor, and the sparse operators.
return {
  Keys = require "perilune.jagged.keys",
  KeyedJaggedTensor = require "perilune.jagged.kjt",
}
