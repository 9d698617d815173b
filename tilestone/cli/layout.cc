// tilestone layout: one HTML page that shows which rank and which file holds what.
//
// Two groups of bars, ranks and files: the length is the number of bytes, the colours are the parts
// of the model (prefixes of the keys). Below them, the largest tensors: how each is divided into
// chunks, coloured by the rank that wrote them. Details are in tooltips.
//
// Nothing depends on how wide the reader's font is: names are HTML beside the pictures, in a column
// that becomes as wide as they are.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"

namespace tilestone::cli {
namespace {

constexpr size_t kParts = 10;         // colours for parts of the model; the rest is grey
constexpr size_t kBars = 256;         // ranks, and files, that are drawn
constexpr size_t kTensors = 24;       // that are drawn
constexpr size_t kChunks = 4096;      // of one drawn tensor
constexpr double kTensorWidth = 236;  // px, of a tensor's picture
constexpr double kWidth = 840;        // px, of the longest bar
constexpr double kBeside = 110;       // px, for the size after a bar
constexpr double kRow = 18;           // px
constexpr double kDigit = 9;          // px, of a number in a picture, in a wide font

// Distinguishable by most people, in print too (Tableau 10).
constexpr const char* kColours[kParts] = {"#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2",
                                          "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#86bcb6"};
constexpr const char* kGrey = "#bab0ac";
constexpr size_t kManyRanks = 32;  // more are drawn in rows of half the height
constexpr size_t kNamed = 4;       // of those, one in so many has its name
// A colour means one thing on the page: a part of the model, a rank, or a step.
constexpr const char* kRankColours[] = {"#1b9e77", "#d95f02", "#7570b3", "#e7298a",
                                        "#66a61e", "#a6761d", "#0b5394", "#800000"};
constexpr std::pair<std::string_view, const char*> kSteps[] = {
    {"planning", "#d9d9d9"}, {"staging", "#969696"}, {"writing", "#525252"}};

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : printable(text)) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// The first two parts of a key, without numbers: "model.layers" for "model.layers.0.weight".
std::string part_of(const std::string& key) {
  std::string part;
  size_t parts = 0;
  for (size_t begin = 0; begin < key.size() && parts < 2;) {
    const size_t end = std::min(key.find_first_of("./", begin), key.size());
    const std::string word = key.substr(begin, end - begin);
    const bool is_number = word.find_first_not_of("0123456789") == std::string::npos;
    if (is_number) break;
    part += (part.empty() ? "" : ".") + word;
    ++parts;
    begin = end + 1;
  }
  return part.empty() ? "others" : part;
}

struct Bar {
  std::string name;
  std::map<size_t, uint64_t> bytes;  // by part
  uint64_t total() const {
    uint64_t sum = 0;
    for (const auto& [part, size] : bytes) sum += size;
    return sum;
  }
};

class Page {
 public:
  explicit Page(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {
    find_ranks();
    find_parts();
  }

  std::string html(const std::string& path) {
    const Metadata& metadata = checkpoint_.metadata();
    out_ = "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<title>Layout of " +
           escaped(path) +
           "</title>\n<style>body{font:14px system-ui,sans-serif;margin:24px;color:#222}"
           "h1{font-size:20px}h2{font-size:16px;margin:28px 0 6px}"
           "h1,.k,.t{overflow-wrap:anywhere}"
           "svg{flex:none;overflow:visible}svg text{font:12px system-ui,sans-serif;fill:#222}"
           ".k{display:inline-block;margin:0 14px 4px 0}"
           ".k i{display:inline-block;width:12px;height:12px;margin-right:5px}"
           ".b{display:flex}.l{flex:none;margin-right:6px;text-align:right;font-size:12px;"
           "white-space:nowrap}.l div{overflow:visible}"
           ".t{display:inline-block;vertical-align:top;margin:0 18px 18px 0;width:240px}"
           ".n{color:#666}svg .n{fill:#666}</style></head><body>\n";
    out_ += fmt::format("<h1>{}</h1>\n<p>{}, {}; {} in {}, {}; written by {}</p>\n", escaped(path),
                        checkpoint_.format_name(), checkpoint_.dialect_name(),
                        counted(metadata.tensors.size(), "tensor"),
                        counted(metadata.files.size(), "file"),
                        human_bytes(metadata.tensor_bytes()), escaped(metadata.writer));
    add_legend();
    const auto [ranks, files] = bars();
    if (ranks.size() > 1) add_bars("What each rank wrote", ranks);
    add_bars("What each file holds", files);
    add_timeline();
    add_tensors();
    out_ += "</body></html>\n";
    return std::move(out_);
  }

 private:
  // The rank of each file; -1: its name has none.
  void find_ranks() {
    for (const std::string& name : checkpoint_.metadata().files) {
      const auto written_by = checkpoint_.rank_of_file(name);
      const std::string text = written_by ? "" : rank_of_stock_file(name);
      int rank = written_by.value_or(-1);
      if (text.starts_with("rank ") && text.size() < 14) rank = std::stoi(text.substr(5));
      ranks_.push_back(rank);
    }
  }

  // The largest parts get a colour of their own.
  void find_parts() {
    std::map<std::string, uint64_t> sizes;
    for (const StoredTensor& tensor : checkpoint_.metadata().tensors) {
      sizes[part_of(tensor.key)] +=
          static_cast<uint64_t>(numel(tensor.shape)) * itemsize(tensor.dtype);
    }
    std::vector<std::pair<uint64_t, std::string>> order;
    for (const auto& [part, size] : sizes) order.emplace_back(size, part);
    std::sort(order.rbegin(), order.rend());
    for (const auto& [size, part] : order) {
      parts_.emplace(part, std::min(names_.size(), kParts));
      if (names_.size() < kParts) names_.push_back(part);
    }
  }

  size_t number_of(const std::string& key) const {
    const auto found = parts_.find(part_of(key));
    return found == parts_.end() ? kParts : found->second;
  }
  static const char* colour(size_t number) { return number < kParts ? kColours[number] : kGrey; }

  std::pair<std::vector<Bar>, std::vector<Bar>> bars() const {
    const Metadata& metadata = checkpoint_.metadata();
    std::map<int, Bar> ranks;
    std::vector<Bar> files(metadata.files.size());
    for (size_t i = 0; i < files.size(); ++i) files[i].name = metadata.files[i];
    for_each_item(metadata, [&](const std::string& key, const ItemLocation& at, bool) {
      const size_t part = number_of(key);
      ranks[ranks_[at.file]].bytes[part] += at.length;
      files[at.file].bytes[part] += at.length;
    });
    std::vector<Bar> by_rank;
    for (auto& [rank, bar] : ranks) {
      bar.name = rank < 0 ? "no rank" : fmt::format("rank {}", rank);
      by_rank.push_back(std::move(bar));
    }
    return {std::move(by_rank), std::move(files)};
  }

  void add_legend() {
    out_ += "<p>";
    for (size_t i = 0; i < names_.size(); ++i) {
      out_ += fmt::format("<span class=\"k\"><i style=\"background:{}\"></i>{}</span>", colour(i),
                          escaped(names_[i]));
    }
    out_ +=
        fmt::format("<span class=\"k\"><i style=\"background:{}\"></i>others</span></p>\n", kGrey);
  }

  void add_bars(const std::string& title, const std::vector<Bar>& bars) {
    uint64_t most = 1;
    for (const Bar& bar : bars) most = std::max(most, bar.total());
    const size_t shown = std::min(bars.size(), kBars);
    out_ += fmt::format("<h2>{}</h2>\n", title);
    if (shown < bars.size()) {
      out_ += fmt::format("<p class=\"n\">the first {} of {}</p>\n", shown, grouped(bars.size()));
    }
    std::vector<std::string> names;
    for (size_t i = 0; i < shown; ++i) names.push_back(bars[i].name);
    begin_rows(names, kRow, 1, kRow * static_cast<double>(shown) + 4);
    for (size_t i = 0; i < shown; ++i) {
      const Bar& bar = bars[i];
      const double y = kRow * static_cast<double>(i);
      double x = 0;
      for (const auto& [part, bytes] : bar.bytes) {
        const double length = kWidth * static_cast<double>(bytes) / static_cast<double>(most);
        out_ += fmt::format(
            "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\">"
            "<title>{}: {}, {}</title></rect>\n",
            x, y + 2, length, kRow - 4, colour(part), escaped(bar.name),
            part < names_.size() ? escaped(names_[part]) : "others", human_bytes(bytes));
        x += length;
      }
      out_ += fmt::format("<text x=\"{:.2f}\" y=\"{}\" class=\"n\">{}</text>\n", x + 6, y + 13,
                          human_bytes(bar.total()));
    }
    out_ += "</svg></div>\n";
  }

  // The names of rows of the height `row`, of which each has `rows`, and the beginning of the
  // picture beside them. Heights in px.
  void begin_rows(const std::vector<std::string>& names, double row, size_t rows, double height) {
    out_ += "<div class=\"b\"><div class=\"l\">\n";
    for (const std::string& name : names) {
      out_ += fmt::format("<div style=\"height:{}px;line-height:{}px\" title=\"{}\">{}</div>\n",
                          row * static_cast<double>(rows), row, escaped(name),
                          escaped(shortened(name, 32)));
    }
    out_ += fmt::format("</div><svg width=\"{}\" height=\"{}\" role=\"img\">\n", kWidth + kBeside,
                        height);
  }

  // What each rank did when, from the receipts of the save.
  void add_timeline() {
    const auto& record = checkpoint_.save_record();
    if (!record) return;
    double first = 0, last = 0;
    for (const auto& steps : record->steps) {
      for (const SaveRecord::Step& step : steps) {
        first = first == 0 ? step.began : std::min(first, step.began);
        last = std::max(last, step.began + step.seconds);
      }
    }
    if (last <= first) return;
    const size_t shown = std::min(record->steps.size(), kBars);
    const bool many = shown > kManyRanks;
    const double row = many ? kRow / 2 : kRow;
    out_ +=
        "<h2>When each rank planned, staged and wrote</h2>\n<p class=\"n\">By the clock of each "
        "rank's host. The save then checks what the ranks report, and publishes.</p>\n<p>";
    for (const auto& [name, fill] : kSteps) {
      out_ += fmt::format("<span class=\"k\"><i style=\"background:{}\"></i>{}</span>", fill, name);
    }
    const double height = row * static_cast<double>(shown);
    out_ += "</p>\n";
    std::vector<std::string> names;
    const size_t rows = many ? kNamed : 1;
    for (size_t rank = 0; rank < shown; rank += rows) names.push_back(fmt::format("rank {}", rank));
    begin_rows(names, row, rows, height + 24);
    add_time_axis(last - first, height);
    for (size_t rank = 0; rank < shown; ++rank) {
      const double y = row * static_cast<double>(rank);
      for (const SaveRecord::Step& step : record->steps[rank]) {
        out_ += fmt::format(
            "<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"{}\">"
            "<title>rank {}: {} {}</title></rect>\n",
            kWidth * (step.began - first) / (last - first), y + row / 9,
            std::max(0.5, kWidth * step.seconds / (last - first)), row - row / 4.5,
            colour_of_step(step.name), rank, escaped(step.name), human_seconds(step.seconds));
      }
    }
    out_ += "</svg></div>\n";
  }

  static const char* colour_of_step(std::string_view step) {
    for (const auto& [name, fill] : kSteps) {
      if (name == step) return fill;
    }
    return kGrey;
  }

  // Lines at up to ten round times, with labels below.
  void add_time_axis(double seconds, double height) {
    double step = 1e-6;
    for (size_t i = 0; seconds / step > 8; ++i) step *= i % 3 == 1 ? 2.5 : 2;  // 1, 2, 5, 10
    for (int i = 0; step * i <= seconds; ++i) {
      const double x = kWidth * step * i / seconds;
      out_ += fmt::format(
          "<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"0\" y2=\"{1}\" stroke=\"#ddd\"/>"
          "<text x=\"{0:.1f}\" y=\"{2}\" text-anchor=\"middle\" class=\"n\">{3:.4g} s</text>\n",
          x, height, height + 16, step * i);
    }
  }

  void add_tensors() {
    const std::vector<StoredTensor>& tensors = checkpoint_.metadata().tensors;
    std::vector<size_t> order(tensors.size());
    std::iota(order.begin(), order.end(), size_t{0});
    const auto bytes = [&](size_t i) {
      return static_cast<uint64_t>(numel(tensors[i].shape)) * itemsize(tensors[i].dtype);
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return bytes(a) > bytes(b); });
    // Of tensors that are divided alike, one is enough.
    std::set<std::string> seen;
    std::erase_if(order, [&](size_t i) {
      return bytes(i) == 0 || tensors[i].chunks.empty() || !seen.insert(kind_of(tensors[i])).second;
    });
    if (order.size() > kTensors) order.resize(kTensors);
    if (order.empty()) return;
    out_ +=
        "<h2>How tensors are divided</h2>\n<p class=\"n\">The largest tensors, one of each kind. "
        "A rectangle is a chunk: the first of the drawn dims goes down, the second to the right; "
        "colour and number are the rank that wrote it.</p>\n<div>\n";
    for (const size_t i : order) add_tensor(tensors[i], bytes(i));
    out_ += "</div>\n";
  }

  // Shape and division, which tensors of a model's layers have in common.
  static std::string kind_of(const StoredTensor& tensor) {
    std::string kind = to_string(tensor.shape) + std::string(to_string(tensor.dtype));
    for (const StoredChunk& chunk : tensor.chunks) {
      kind += to_string(chunk.box) + ";";
      if (kind.size() > 4096) break;
    }
    return kind;
  }

  // The two dims with the most cuts, in order; the others are drawn at the first chunk's place.
  static std::pair<size_t, size_t> drawn_dims(const StoredTensor& tensor) {
    std::vector<std::pair<size_t, size_t>> cuts;  // number, dim
    for (size_t d = 0; d < tensor.shape.size(); ++d) {
      std::set<int64_t> places;
      for (const StoredChunk& chunk : tensor.chunks) places.insert(chunk.box.offset[d]);
      cuts.emplace_back(places.size(), d);
    }
    std::stable_sort(cuts.begin(), cuts.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    const size_t first = cuts.empty() ? 0 : cuts[0].second;
    const size_t second = cuts.size() < 2 ? first : cuts[1].second;
    return {std::min(first, second), std::max(first, second)};
  }

  void add_tensor(const StoredTensor& tensor, uint64_t bytes) {
    constexpr double kSide = 150;  // px
    const auto [down, right] = drawn_dims(tensor);
    const bool flat = down == right;  // one dim, or none
    const double height = flat ? 40 : kSide;
    out_ += fmt::format(
        "<div class=\"t\"><div title=\"{}\">{}</div><div class=\"n\">{} {}, {}, {}</div>"
        "<svg width=\"240\" height=\"{}\" role=\"img\">\n",
        escaped(tensor.key), escaped(shortened(tensor.key, 34)), to_string(tensor.dtype),
        shape_text(tensor.shape), human_bytes(bytes), counted(tensor.chunks.size(), "chunk"),
        height + 2);
    size_t drawn = 0;
    for (const StoredChunk& chunk : tensor.chunks) {
      if (!is_in_picture(tensor, chunk, down, right) || ++drawn > kChunks) continue;
      add_chunk(tensor, chunk, down, right, height);
    }
    out_ += "</svg></div>\n";
  }

  // `height`: of the tensor's picture, px.
  void add_chunk(const StoredTensor& tensor, const StoredChunk& chunk, size_t down, size_t right,
                 double height) {
    const auto scale = [](int64_t place, int64_t of, double side) {
      return side * static_cast<double>(place) / static_cast<double>(of);
    };
    double x = 0, y = 0, w = kTensorWidth, h = height;
    if (!tensor.shape.empty()) {
      x = scale(chunk.box.offset[right], tensor.shape[right], kTensorWidth);
      w = scale(chunk.box.shape[right], tensor.shape[right], kTensorWidth);
      if (down != right) {
        y = scale(chunk.box.offset[down], tensor.shape[down], height);
        h = scale(chunk.box.shape[down], tensor.shape[down], height);
      }
    }
    const int rank = ranks_[chunk.at.file];
    const char* const fill =
        rank < 0 ? kGrey : kRankColours[static_cast<size_t>(rank) % std::size(kRankColours)];
    out_ += fmt::format(
        "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\" "
        "stroke=\"#fff\" stroke-width=\"0.6\"><title>{} in {}</title></rect>\n",
        x + 1, y + 1, w, h, fill, to_string(chunk.box),
        escaped(checkpoint_.metadata().files[chunk.at.file]));
    const std::string number = std::to_string(rank);
    if (rank >= 0 && w > kDigit * static_cast<double>(number.size()) && h > 13) {
      out_ += fmt::format(
          "<text x=\"{:.2f}\" y=\"{:.2f}\" text-anchor=\"middle\" "
          "style=\"fill:#fff\">{}</text>\n",
          x + 1 + w / 2, y + 5 + h / 2, number);
    }
  }

  // Whether the chunk lies where the dims that are not drawn have the first chunk's place.
  static bool is_in_picture(const StoredTensor& tensor, const StoredChunk& chunk, size_t down,
                            size_t right) {
    for (size_t d = 0; d < tensor.shape.size(); ++d) {
      if (d == down || d == right) continue;
      if (chunk.box.offset[d] != tensor.chunks[0].box.offset[d]) return false;
    }
    return true;
  }

  const Checkpoint& checkpoint_;
  std::vector<int> ranks_;  // by file
  std::map<std::string, size_t> parts_;
  std::vector<std::string> names_;  // of the parts with a colour
  std::string out_;
};

}  // namespace

int layout(const LayoutOptions& options) {
  const Checkpoint checkpoint = Checkpoint::open(location_of(options.path, options.follow_links));
  const std::string html = Page(checkpoint).html(options.path);
  if (options.output == "-") {
    fmt::print("{}", html);
    return kOk;
  }
  write_file(options.output, {html});
  fmt::print("wrote {}\n", options.output);
  return kOk;
}

}  // namespace tilestone::cli
