// The calls that ik_llama.cpp's own programs make, as C functions for ik_llama_cpp_peer.py. Its structures change often, so its
// headers are compiled, and nothing is declared anew.

#include "llama.h"
#include "ngram-cache.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int kDrafts = 8;
// Most drafts of a round, as its server's mode "ngram-cache" has it.

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point started) { return std::chrono::duration<double>(Clock::now() - started).count(); }

struct Contestant {
    llama_model* model;
    llama_context* context;
    llama_batch batch;
    int vocabulary;

    // Compute tokens from a position on; what the cache has from there is dropped. Logits of all, or of the last one.
    bool decode(const int32_t* tokens, int count, int start, bool all) {
        llama_kv_cache_seq_rm(context, 0, start, -1);
        batch.n_tokens = count;
        for (int i = 0; i < count; i++) {
            batch.token[i] = tokens[i];
            batch.pos[i] = start + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = all || i == count - 1;
        }
        return llama_decode(context, batch) == 0;
    }

    int32_t greedy(int row) {
        const float* logits = llama_get_logits_ith(context, row);
        return int32_t(std::max_element(logits, logits + vocabulary) - logits);
    }
};

// A number of the file's metadata; such a name follows that of the architecture.
int number(const llama_model* model, const char* name) {
    char value[64] = "";
    llama_model_meta_val_str(model, "general.architecture", value, sizeof value);
    const std::string key = std::string(value) + "." + name;
    llama_model_meta_val_str(model, key.c_str(), value, sizeof value);
    return std::atoi(value);
}

void drop(ggml_log_level, const char*, void*) {}

}  // namespace

extern "C" {

// Null if the file cannot be loaded.
Contestant* peer_open(const char* file, int slots, int threads, bool repack) {
    llama_log_set(drop, nullptr);
    llama_backend_init();
    auto options = llama_model_default_params();
    options.repack_tensors = repack;
    options.use_mmap = !repack;
    llama_model* model = llama_model_load_from_file(file, options);
    if (model == nullptr) return nullptr;
    auto sizes = llama_context_default_params();
    sizes.n_ctx = sizes.n_batch = uint32_t(slots);
    sizes.n_threads = sizes.n_threads_batch = uint32_t(threads);
    llama_context* context = llama_init_from_model(model, sizes);
    if (context == nullptr) return nullptr;
    return new Contestant{model, context, llama_batch_init(slots, 0, 1), llama_n_vocab(model)};
}

// Bytes of keys and values of a token, which are float16.
int peer_slot_bytes(Contestant* self) {
    const int width = llama_model_n_embd(self->model) / number(self->model, "attention.head_count");
    return 2 * 2 * llama_n_layer(self->model) * width * number(self->model, "attention.head_count_kv");
}

// Decode greedily, with drafts by n-grams of the text or without. Gives the tokens, and the seconds until each came.
bool peer_generate(Contestant* self, const int32_t* prompt, int length, int count, bool lookup, int32_t* tokens, double* seconds) {
    const auto started = Clock::now();
    std::vector<llama_token> text(prompt, prompt + length), pending = text;
    common_ngram_cache grams, none;
    if (lookup) common_ngram_cache_update(grams, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, text, length, false);
    for (int made = 0, start = 0; made < count;) {
        const bool first = start == 0;
        if (!self->decode(pending.data(), int(pending.size()), start, !first)) return false;
        // Of a round's rows, the one behind the root and those behind accepted drafts give tokens.
        for (size_t row = first ? pending.size() - 1 : 0; row < pending.size() && made < count; row++) {
            const int32_t token = self->greedy(int(row));
            text.push_back(token);
            tokens[made] = token;
            seconds[made++] = seconds_since(started);
            if (lookup) common_ngram_cache_update(grams, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, text, 1, false);
            if (row + 1 < pending.size() && pending[row + 1] != token) break;
        }
        start = int(text.size()) - 1;
        pending = {text.back()};
        if (lookup) common_ngram_cache_draft(text, pending, kDrafts, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, grams, none, none);
    }
    return true;
}

// Seconds of a pass over tokens from a position on; negative if it failed.
double peer_pass(Contestant* self, const int32_t* tokens, int count, int start, bool all) {
    const auto started = Clock::now();
    if (!self->decode(tokens, count, start, all)) return -1;
    llama_get_logits(self->context);  // waits for them
    return seconds_since(started);
}

}  // extern "C"
