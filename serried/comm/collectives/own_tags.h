// Tags that the library sends under itself, over groups over which users may send, too.
#pragma once

#include <c10/util/StringUtil.h>

#include <string>

namespace serried::detail {

/// Above what users are likely to take. Of a pipeline's stage s: + 2 s what it gives, + 2 s + 1 the gradient that it
/// gives.
constexpr int kPipelineTags = 1 << 20;
/// Of attention by the ring: keys and values; + 1 their gradients.
constexpr int kRingTags = 1 << 21;

/// "tag 7", and what is sent under one of the library's own: "tag 1048578 (of a pipeline: the output of stage 1)". A
/// replay knows no more of a message.
inline std::string tag_text(int tag) {
  const std::string text = c10::str("tag ", tag);
  if (tag < kPipelineTags || tag > kRingTags + 1) return text;
  if (tag >= kRingTags) return text + (tag == kRingTags ? " (of attention: keys)" : " (of attention: gradients)");
  const int of_pipeline = tag - kPipelineTags;
  return c10::str(text, " (of a pipeline: the ", of_pipeline % 2 == 0 ? "output" : "gradient", " of stage ",
                  of_pipeline / 2, ")");
}

}  // namespace serried::detail
