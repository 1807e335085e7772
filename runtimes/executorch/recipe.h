/* Makes the model file that a recipe describes: some KB travel instead of the model. recipe.py describes the format. */
#pragma once
#include "../report.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <iomanip>
#include <string>
#include <vector>

namespace hilnas {

class Recipe {
  public:
    using Fail = std::function<void(const std::string &)>; /* does not return */

    Recipe(const char *path, Fail refuse, Fail not_written)
        : in_(path, std::ios::binary), refuse_(std::move(refuse)), not_written_(std::move(not_written)) {}

    /* Writes the file, which must not be there yet; returns its size. */
    uint64_t make(const char *path) {
        if (word() != "hilnas-recipe" || number(UINT32_MAX) != 1) refuse_("no recipe of version 1");
        uint64_t seed = number(UINT64_MAX), header_size = number(MOST_HEADER), pools = number(MOST_POOLS);
        uint64_t fills = number(MOST_FILLS);
        std::vector<char> header(header_size);
        if (in_.get() != '\n' || !in_.read(header.data(), (std::streamsize)header_size)) refuse_("the header is cut off");
        for (uint64_t i = 0; i < pools; i++) read_pool(splitmix64(&seed));
        int descriptor = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
        file_ = descriptor < 0 ? nullptr : fdopen(descriptor, "wb");
        if (!file_) not_written_(strerror(errno));
        put(header.data(), header.size());
        for (uint64_t i = 0; i < fills; i++) read_fill();
        if (fclose(file_)) not_written_(strerror(errno));
        return written_;
    }

  private:
    static constexpr uint64_t ALIGNMENT = 64, MOST_HEADER = 1 << 28, MOST_POOLS = 16, MOST_FILLS = 1 << 22;
    static constexpr uint64_t MOST_NUMBERS = 1 << 26, MOST_BYTES = (uint64_t)1 << 40;

    std::string word() {
        std::string text;
        if (!(in_ >> std::setw(32) >> text)) refuse_("it is cut off");
        return text;
    }

    uint64_t number(uint64_t most) {
        std::string text = word();
        char *end;
        errno = 0;
        uint64_t value = strtoull(text.c_str(), &end, 10);
        if (text[0] == '-' || errno || *end || value > most) refuse_("a number is missing or too large");
        return value;
    }

    void read_pool(uint64_t seed) {
        std::string kind = word();
        if (kind != "bytes" && kind != "f32") refuse_("a pool of unknown kind");
        int shift = (int)number(64);
        size_t size = (size_t)number(MOST_NUMBERS) * (kind == "f32" ? 4 : 1);
        if (!size) refuse_("an empty pool");
        std::vector<uint8_t> pool((size + 7) / 8 * 8);
        for (size_t at = 0; at < size; at += 8) {
            uint64_t random = splitmix64(&seed);
            memcpy(&pool[at], &random, 8); /* every machine that is measured is little-endian */
        }
        pool.resize(size);
        for (size_t at = 0; kind == "f32" && at < size; at += 4) {
            int32_t bits;
            memcpy(&bits, &pool[at], 4);
            float value = std::ldexp((float)(bits >> 8), -shift);
            memcpy(&pool[at], &value, 4);
        }
        pools_.push_back(std::move(pool));
    }

    void read_fill() {
        uint64_t size = number(MOST_BYTES);
        std::string how = word();
        if (how == "tile") {
            uint64_t pool = number(MOST_POOLS);
            if (pool >= pools_.size()) refuse_("a part of no pool");
            uint64_t start = number(pools_[pool].size() - 1);
            put_round(pools_[pool], start, size);
        } else if (how == "word") {
            uint32_t value = (uint32_t)number(UINT32_MAX);
            put_round(repeated({value}), 0, size);
        } else if (how == "decay") {
            std::vector<uint32_t> values(16);
            for (int i = 0; i < 16; i++) {
                float rate = (float)-(i + 1);
                memcpy(&values[i], &rate, 4);
            }
            put_round(repeated(values), 0, size);
        } else refuse_("a part of unknown kind");
        static const char padding[ALIGNMENT] = {};
        put(padding, (size_t)(-size % ALIGNMENT));
    }

    /* Many times over, so that few writes are needed; 16 words or a divisor of them. */
    static std::vector<uint8_t> repeated(const std::vector<uint32_t> &words) {
        std::vector<uint8_t> bytes(1 << 16);
        for (size_t i = 0; i < bytes.size() / 4; i++) memcpy(&bytes[4 * i], &words[i % words.size()], 4);
        return bytes;
    }

    void put_round(const std::vector<uint8_t> &pattern, uint64_t at, uint64_t size) {
        for (; size; at = 0) {
            uint64_t count = std::min<uint64_t>(size, pattern.size() - at);
            put(&pattern[at], (size_t)count);
            size -= count;
        }
    }

    void put(const void *bytes, size_t size) {
        if (fwrite(bytes, 1, size, file_) != size) not_written_(strerror(errno));
        written_ += size;
    }

    std::ifstream in_;
    Fail refuse_, not_written_;
    FILE *file_ = nullptr;
    uint64_t written_ = 0;
    std::vector<std::vector<uint8_t>> pools_;
};

} // namespace hilnas
