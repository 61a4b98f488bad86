// What one emulation found, written as one JSON object.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace emulate {

/// Findings by kind. The first few of each kind are kept in words, all are counted.
class Report {
 public:
  static constexpr std::size_t kept = 8;

  void add(std::string const& kind, std::string const& text) {
    auto& list = findings_[kind];
    ++list.count;
    for (auto const& known : list.texts) {
      if (known == text) return;
    }
    if (list.texts.size() < kept) list.texts.push_back(text);
  }

  bool clean() const { return findings_.empty(); }

  std::string json() const {
    std::string out = "{";
    for (auto const& [kind, list] : findings_) {
      if (out.size() > 1) out += ", ";
      out += quote(kind) + ": {\"count\": " + std::to_string(list.count) + ", \"first\": [";
      for (std::size_t i = 0; i < list.texts.size(); ++i) out += (i ? ", " : "") + quote(list.texts[i]);
      out += "]}";
    }
    return out + "}";
  }

  static std::string quote(std::string const& text) {
    std::string out = "\"";
    for (char c : text) {
      if (c == '"' || c == '\\') out += '\\';
      if (c == '\n')
        out += "\\n";
      else
        out += c;
    }
    return out + "\"";
  }

 private:
  struct List {
    std::uint64_t count = 0;
    std::vector<std::string> texts;
  };
  std::map<std::string, List> findings_;
};

inline Report& report() {
  static Report the;
  return the;
}

template <class... Args>
std::string format(char const* pattern, Args... args) {
  char buffer[768];
  std::snprintf(buffer, sizeof buffer, pattern, args...);
  return buffer;
}

}  // namespace emulate
