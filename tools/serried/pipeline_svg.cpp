// Rectangles by hand; colours by style sheet, so that viewers without one for the dark still show the light.
#include "tools/serried/pipeline_svg.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "serried/base/text.h"
#include "tools/serried/pipeline_text.h"

namespace serried::tools {
namespace {

using Kind = PipelineAction::Kind;
using Span = PipelineSimulation::Span;

constexpr double kGutter = 84, kRight = 16, kTop = 64, kRow = 28, kGap = 6, kAxis = 34, kLegend = 34;

// A rank's second, fourth, ... stage has another shade: paler on light paper, darker on dark.
constexpr const char* kStyle = R"(
.paper{fill:#ffffff} .ink{fill:#1f2328} .quiet{fill:#59636e} .line{stroke:#d1d9e0}
.wait rect{fill:url(#hatch)} .hatch-paper{fill:#f6f8fa} .hatch-line{stroke:#c3ccd6}
.F rect{fill:#2f6fca} .B rect{fill:#b5521b} .I rect{fill:#7a4fc0} .W rect{fill:#1f7a52} .S rect{fill:#59636e}
.F.second rect{fill:#bcd5f7} .B.second rect{fill:#f6cba9} .I.second rect{fill:#d9c8f5} .W.second rect{fill:#b5e3cc}
.F text,.B text,.I text,.W text{fill:#ffffff} .second text{fill:#1f2328}
svg.pipeline text{font:11px ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif} svg.pipeline .name{font-weight:600}
svg.pipeline .small{font-size:9px}
svg.pipeline .title{font-size:15px;font-weight:600}
.action rect{stroke-width:1;stroke:#ffffff} .action:hover rect{stroke:#1f2328;stroke-width:2} .middle{text-anchor:middle}
@media (prefers-color-scheme:dark){
.paper{fill:#0d1117} .ink{fill:#e6edf3} .quiet{fill:#9198a1} .line{stroke:#30363d}
.hatch-paper{fill:#161b22} .hatch-line{stroke:#3d444d}
.F rect{fill:#79b8ff} .B rect{fill:#f0a064} .I rect{fill:#c3a6ff} .W rect{fill:#6fd6a4} .S rect{fill:#9198a1}
.F.second rect{fill:#1d4a86} .B.second rect{fill:#7a3a12} .I.second rect{fill:#523390} .W.second rect{fill:#17573b}
.F text,.B text,.I text,.W text{fill:#0d1117} .second text{fill:#e6edf3}
.action rect{stroke:#0d1117} .action:hover rect{stroke:#e6edf3}}
)";

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  std::string result = text;
  while (result.back() == '0') result.pop_back();
  if (result.back() == '.') result.pop_back();
  return result;
}

std::string rectangle(double x, double y, double width, double height) {
  return "<rect x=\"" + number(x) + "\" y=\"" + number(y) + "\" width=\"" + number(width) + "\" height=\"" +
         number(height) + "\"/>";
}

std::string words(double x, double y, const std::string& style, const std::string& text) {
  return "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" class=\"" + style + "\">" + detail::escaped(text) +
         "</text>";
}

char letter_of(Kind kind) {
  constexpr char kLetters[] = {'F', 'B', 'I', 'W', 'S', 'S', 'S'};
  return kLetters[size_t(kind)];
}

class Picture {
 public:
  Picture(const PipelineTable& table, const PipelineSimulation& simulation, const PipelineSimulation& scale_of)
      : table_(table), simulation_(simulation), scale_(scale_for(scale_of)) {
    stages_.reserve(table.rows().size());
    for (int64_t rank = 0; rank < table.ranks(); ++rank) stages_.push_back(table.stages_of(rank));
  }

  std::string draw(const std::string& title) {
    const double width = std::max(kGutter + simulation_.makespan * scale_ + kRight, 640.0);
    const double bottom = kTop + double(table_.ranks()) * (kRow + kGap);
    const std::string size = number(width) + "\" height=\"" + number(bottom + kAxis + kLegend) + "\"";
    text_ = "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"pipeline\" role=\"img\" width=\"" + size +
            " viewBox=\"0 0 " + number(width) + " " + number(bottom + kAxis + kLegend) + "\">\n<title>" +
            detail::escaped(title) + "</title>\n<style>" + kStyle +
            "</style>\n<defs><pattern id=\"hatch\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
            "patternTransform=\"rotate(45)\"><rect class=\"hatch-paper\" width=\"6\" height=\"6\"/>"
            "<line class=\"hatch-line\" x1=\"0\" y1=\"0\" x2=\"0\" y2=\"6\" stroke-width=\"2\"/></pattern></defs>\n"
            "<g class=\"paper\">" +
            rectangle(0, 0, width, bottom + kAxis + kLegend) + "</g>\n" + words(12, 26, "ink title", title) +
            words(12, 46, "quiet",
                  "makespan " + short_number(simulation_.makespan) + ", bubble " + percent(simulation_.bubble)) +
            "\n";
    for (size_t rank = 0; rank < table_.rows().size(); ++rank) draw_row(rank);
    draw_axis(bottom);
    draw_legend(bottom + kAxis);
    return std::move(text_) + "</svg>\n";
  }

 private:
  // Pixels per unit of time: as much as fits on a screen, but so that an action is wide enough for its number.
  static double scale_for(const PipelineSimulation& simulation) {
    constexpr double kScreen = 1400, kNarrowest = 18, kWidest = 44;
    double busy = 0;
    double count = 0;
    for (const auto& row : simulation.spans) {
      for (const Span& span : row) {
        busy += span.end - span.begin;
        count += span.end > span.begin ? 1 : 0;
      }
    }
    if (busy <= 0) return 1;
    const double usual = busy / count;
    return std::clamp(kScreen / simulation.makespan, kNarrowest / usual, kWidest / usual);
  }

  double x_of(double time) const { return kGutter + time * scale_; }
  static double y_of(size_t rank) { return kTop + double(rank) * (kRow + kGap); }

  std::string from_to(const Span& span) const { return short_number(span.begin) + " to " + short_number(span.end); }

  void draw_row(size_t rank) {
    const double y = y_of(rank);
    const std::string name = "rank " + std::to_string(rank);
    text_ += "<g>" + words(12, y + 12, "ink name", name) +
             words(12, y + 24, "quiet small", std::to_string(simulation_.peak_in_flight[rank]) + " in flight") + "\n";
    double time = 0;
    for (size_t i = 0; i < table_.rows()[rank].size(); ++i) {
      const Span span = simulation_.spans[rank][i];
      draw_wait({time, span.begin}, rank);
      time = span.end;
    }
    draw_wait({time, simulation_.makespan}, rank);
    for (size_t i = 0; i < table_.rows()[rank].size(); ++i) {
      draw_action(table_.rows()[rank][i], simulation_.spans[rank][i], rank);
    }
    text_ += "</g>\n";
  }

  void draw_wait(const Span& span, size_t rank) {
    if (span.end <= span.begin) return;
    text_ += "<g class=\"wait\"><title>rank " + std::to_string(rank) + " waits, " + from_to(span) + "</title>" +
             rectangle(x_of(span.begin), y_of(rank), (span.end - span.begin) * scale_, kRow) + "</g>\n";
  }

  bool is_second(const PipelineAction& action, size_t rank) const {
    const auto& mine = stages_[rank];
    return (std::find(mine.begin(), mine.end(), action.stage) - mine.begin()) % 2 == 1;
  }

  void draw_action(const PipelineAction& action, const Span& span, size_t rank) {
    // What takes no time is a line that can still be pointed at.
    const double width = std::max((span.end - span.begin) * scale_, 2.0);
    const bool numbered = has_microbatch(action.kind);
    const std::string label = numbered ? std::to_string(action.microbatch) : "";
    text_ += std::string("<g class=\"action ") + letter_of(action.kind) +
             (is_second(action, rank) ? " second\"" : "\"") + (numbered ? " data-m=\"" + label + "\"" : "") +
             "><title>" + to_string(action) + ": rank " + std::to_string(rank) + ", " + from_to(span) + "</title>" +
             rectangle(x_of(span.begin), y_of(rank), width, kRow);
    if (numbered && width >= 4 + 7 * double(label.size())) {
      text_ += words(x_of(span.begin) + width / 2, y_of(rank) + 18, "middle", label);
    }
    text_ += "</g>\n";
  }

  void draw_axis(double y) {
    const double about = 80 / scale_;  // time between two marks
    const double power = std::pow(10, std::floor(std::log10(about)));
    const double step = power * (about > 5 * power ? 10 : about > 2 * power ? 5 : about > power ? 2 : 1);
    for (double time = 0; time <= simulation_.makespan * (1 + 1e-9); time += step) {
      text_ += "<line class=\"line\" x1=\"" + number(x_of(time)) + "\" x2=\"" + number(x_of(time)) + "\" y1=\"" +
               number(y) + "\" y2=\"" + number(y + 6) + "\"/>" +
               words(x_of(time), y + 20, "quiet middle", short_number(time));
    }
    text_ += "\n";
  }

  void draw_legend(double y) {
    static constexpr struct {
      Kind kind;
      const char* meaning;
      double width;
    } kKinds[] = {{Kind::F, "F forward", 96},
                  {Kind::B, "B backward", 106},
                  {Kind::I, "I gradients of inputs", 160},
                  {Kind::W, "W gradients of weights", 172}};
    double x = 12;
    for (const auto& [kind, meaning, width] : kKinds) {
      if (!has_kind(kind)) continue;
      text_ += std::string("<g class=\"") + letter_of(kind) + "\">" + rectangle(x, y + 4, 14, 14) + "</g>" +
               words(x + 20, y + 15, "ink", meaning);
      x += width;
    }
    text_ += "<g class=\"wait\">" + rectangle(x, y + 4, 14, 14) + "</g>" + words(x + 20, y + 15, "ink", "waits");
    const bool has_second =
        std::any_of(stages_.begin(), stages_.end(), [](const auto& mine) { return mine.size() > 1; });
    const std::string shade = has_second ? "; other shade: every second stage of a rank" : "";
    text_ += words(x + 72, y + 15, "quiet", "numbers: micro-batches" + shade) + "\n";
  }

  bool has_kind(Kind kind) const {
    for (const PipelineTable::Row& row : table_.rows()) {
      for (const PipelineAction& action : row) {
        if (action.kind == kind) return true;
      }
    }
    return false;
  }

  const PipelineTable& table_;
  const PipelineSimulation& simulation_;
  double scale_;
  std::vector<std::vector<int64_t>> stages_;
  std::string text_;
};

}  // namespace

std::string pipeline_svg(const PipelineTable& table, const PipelineSimulation& simulation, const std::string& title,
                         const PipelineSimulation* scale_of) {
  return Picture(table, simulation, scale_of != nullptr ? *scale_of : simulation).draw(title);
}

}  // namespace serried::tools
