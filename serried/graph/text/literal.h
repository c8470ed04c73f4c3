// Constants of a graph as text that reads back to the last bit.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/util/DimVector.h>

#include <string>
#include <string_view>

#include "serried/graph/text/cursor.h"

namespace serried::graph {

/// What an argument's literals are read as: numbers that stand for a dtype, layout or memory format have that type.
c10::TypePtr literal_type(const c10::Argument& declared);

/// "1", "1.0", "nan", "true", "none", "[1, 2]", "\"text\"", "f32", "cpu", "sum", "premul_sum(0.5)". A number is written
/// as the name that it stands for only where `type` says so.
std::string literal_text(const c10::IValue& constant, const c10::TypePtr& type = nullptr);

/// What has no text: generators of the user's, storages, other objects.
bool has_literal(const c10::IValue& constant);

/// What literal_text wrote.
c10::IValue read_literal(Cursor& in, const c10::TypePtr& type);

/// With quotes around it.
std::string quoted_text(std::string_view text);
std::string read_quoted(Cursor& in);

/// "[2, 3]"
std::string numbers_text(c10::IntArrayRef numbers);
c10::DimVector read_numbers(Cursor& in);

/// That of a tensor: a number that stands for none fails.
at::ScalarType read_dtype(Cursor& in);
at::Device read_device(Cursor& in);
int64_t read_int(Cursor& in);

}  // namespace serried::graph
