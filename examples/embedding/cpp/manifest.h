// The values of an engine directory's manifest.json that a service needs to bind plans. All are checked.

#pragma once

#include <NvInfer.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "json.h"

using nvinfer1::DataType;
using Tokens = std::vector<int64_t>;

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws a sentence of these parts unless the condition holds.
template <typename... Parts> static void require(bool holds, const Parts &...parts) {
  if (holds) return;
  std::ostringstream sentence;
  (sentence << ... << parts);
  throw Error(sentence.str());
}

constexpr int64_t MOST = 1 << 30;  // largest size or id

struct Type {
  const char *name;
  DataType type;
  int64_t bytes;
  uint32_t hidden;  // the bits of -30000, which hides a slot from a token; it fits float16, and infinity would give NaN
};
constexpr Type TYPES[] = {{"float32", DataType::kFLOAT, 4, 0xC6EA6000},
                          {"float16", DataType::kHALF, 2, 0xF753},
                          {"bfloat16", DataType::kBF16, 2, 0xC6EA},
                          {"int64", DataType::kINT64, 8, 0}};

static const Type &type_of(const std::string &name) {
  for (const Type &type : TYPES)
    if (type.name == name) return type;
  throw json::Error("has the type \"" + name + "\", which this program does not know");
}

struct Tensor {
  std::string name;
  std::vector<std::string> shape;  // integers, and B, n, S, R
  const Type *type;
  bool is_input;
};
struct Graph {
  std::string file, plan;
  int64_t plan_bytes;
  std::vector<int64_t> most;  // most tokens of a call, by profile: decoding and, if the plan has it, prefill
  std::vector<Tensor> tensors;
};
struct Manifest {
  Graph draft, verify;
  int64_t vocab_size, max_seq_len, most_drafted, slots, top_k;
  Tokens eos;
};

static Graph read_graph(const json::Value &root, const json::Value &info, const std::string &directory) {
  Graph graph{info.get("file", json::Kind::text).text, {}, 0, {}, {}};
  const json::Value &plans = root.get("plans", json::Kind::object);
  const bool built = std::count(plans.names.begin(), plans.names.end(), graph.file) == 1;
  require(built, directory, " has no plan of ", graph.file, "; build it with: eesd-build ", directory, ".");
  const json::Value &plan = plans.get(graph.file, json::Kind::object);
  graph.plan = plan.get("file", json::Kind::text).text;
  require(plan.get("refit", json::Kind::text).text.empty(), graph.plan, " holds no weights, which this program cannot give it; ",
          "build it without --strip-weights.");
  if (graph.plan.find('/') != std::string::npos) throw json::Error("names a plan outside of its directory");
  graph.plan_bytes = plan.integer("size", 1, INT64_MAX);
  for (const json::Value &profile : plan.get("profiles", json::Kind::list).items) {
    if (profile.items.size() != 3) throw json::Error("has another profile than least, usual and most tokens");
    graph.most.push_back(profile.items[2].as_integer("profiles", 1, MOST));
  }
  if (graph.most.empty()) throw json::Error("has a plan without profiles");
  for (const char *side : {"inputs", "outputs"})
    for (const json::Value &one : info.get(side, json::Kind::list).items) {
      const std::string &type = one.get("dtype", json::Kind::text).text;
      graph.tensors.push_back({one.get("name", json::Kind::text).text, {}, &type_of(type), *side == 'i'});
      std::vector<std::string> &shape = graph.tensors.back().shape;
      for (const json::Value &size : one.get("shape", json::Kind::list).items) {
        const bool is_symbol = size.text == "B" || size.text == "n" || size.text == "S" || size.text == "R";
        if (!is_symbol) size.as_integer("shape", 1, MOST);
        shape.push_back(size.text);
      }
      if (shape.size() > nvinfer1::Dims::MAX_DIMS) throw json::Error("has a shape of too many dimensions");
    }
  return graph;
}

static Manifest read_manifest(const std::string &directory, bool drafts) {
  const std::string path = directory + "/manifest.json";
  std::ifstream file(path, std::ios::binary);
  require(file.good(), path, " cannot be read (", std::strerror(errno), "); name a directory of eesd-export.");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  try {
    const json::Value root = json::Reader(text).whole();
    const int64_t version = root.integer("format_version", 0, MOST);
    require(version == 1, path, " has format version ", version, ", and this program reads version 1.");
    const auto &stages = root.get("verify", json::Kind::list).items;
    require(stages.size() == 1, directory, " has ", stages.size(), " stages, and this program runs one; export without ",
            "--stages.");
    const json::Value &head = root.get("exit_head", json::Kind::object);
    const bool can_draft = head.get("trained", json::Kind::flag).text == "true" || head.integer("blocks", 0, MOST) > 0;
    require(can_draft || !drafts, directory, " has no exit head to draft with; give 0 drafted tokens.");
    Manifest manifest{};
    manifest.vocab_size = root.get("geometry", json::Kind::object).integer("vocab_size", 1, MOST);
    manifest.max_seq_len = root.integer("max_seq_len", 1, MOST);
    manifest.most_drafted = root.integer("max_tree_nodes", 1, MOST);
    manifest.top_k = root.integer("draft_top_k", 1, MOST);
    // After the slots of the text there is room for the tokens that pad a round.
    manifest.slots = (manifest.max_seq_len + manifest.most_drafted + 15) / 16 * 16;
    for (const json::Value &id : root.get("eos_token_ids", json::Kind::list).items)
      manifest.eos.push_back(id.as_integer("eos_token_ids", 0, MOST));
    manifest.verify = read_graph(root, stages[0], directory);
    if (drafts) manifest.draft = read_graph(root, root.get("draft", json::Kind::object), directory);
    return manifest;
  } catch (const json::Error &error) {
    throw Error(path + " " + error.what() + "; export again with: eesd-export.");
  }
}
