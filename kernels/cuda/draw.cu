// Logits to tokens: a port of crates/device/src/cpu/draw.rs. Every sum over the vocabulary is an exact
// integer and every choice an integer maximum, so blocks and threads may take ids in any order.
//
// draw_scores: grid (blocks of 2048 ids, draws). z = adjusted logits over the temperature, -inf where an id
// may not be drawn; maxima of every 64 ids and of the block. draw_weights: the same grid. Sums of token
// weights of the block; the best perturbed id where nothing is cut. draw_choose: one block of 512 threads a
// draw. Kept sets by radix descents over keys, then the token, its log-probability and the best of the raw
// distribution. Bound: launch latency; a row of logits stays in L2.
#include "common.cuh"

struct Adjust {
    uint token;
    float repetition, frequency, presence, bias;
};

struct Draw {
    uint row;
    float temperature;
    uint top_k;
    float top_p;
    float min_p;
    uint seed_low, seed_high;
    uint choice;
    uint position_low, position_high;
    uint length;        // ids that count: the lesser of the width and the vocabulary
    uint adjust_at;     // first entry in adjusts
    uint adjust_count;
    uint mask_at;       // first word in masks
    uint mask_words;    // NO_MASK: every id may be drawn
    uint top;           // best tokens of the raw distribution to report
};

#define NO_MASK 0xffffffffu
#define IDS 2048      // of a block
#define CHUNK 64      // ids with a maximum of their own
#define LIST 6144     // candidates kept in shared memory
#define TOP_MAX 1024  // most best tokens reported

// Scratch of one draw; `chunks` is a multiple of IDS / CHUNK.
struct Scratch {
    float* z;            // [draws, chunks * CHUNK]; not written for greedy draws
    float* z_maxima;     // [draws, chunks], NaN left out
    float* raw_maxima;   // [draws, chunks]
    uint* raw_magnitude; // [draws, blocks]: largest |logit| as bits
    ulong* raw_weights;  // [draws, blocks]
    ulong* z_weights;    // [draws, blocks]
    ulong* best;         // [draws, blocks]: best key of what is drawn from when nothing is cut
    float* raw_tops;     // [draws, blocks]: largest of the blocks' maxima
    float* z_tops;
    uint chunks;
    uint blocks;
};

SHARED uint order_key(float x) {
    uint bits = BITS(x + 0.0f);
    uint key = bits >> 31 == 0 ? bits | 0x80000000u : ~bits;
    return x != x ? 0u : key;
}
SHARED ulong pick_key(float x, uint id) { return (ulong)order_key(x) << 32 | (uint)~id; }
SHARED uint key_id(ulong key) { return ~(uint)key; }
// Keys of -inf and NaN are below.
#define KEY_MIN (0x00800000ull << 32)

SHARED bool cuts(const Draw& d) {
    return (d.top_k != 0 && d.top_k < d.length) || d.top_p < 1.0f || d.min_p > 0.0f;
}

SHARED bool mask_allows(const Draw& d, const uint* masks, uint id) {
    if (d.mask_words == NO_MASK) return true;
    return id / 32 < d.mask_words && (masks[d.mask_at + id / 32] >> (id % 32) & 1);
}

// The logit after penalties and bias; several changes of a token follow each other.
SHARED float adjusted(float x, uint id, const Draw& d, const Adjust* adjusts) {
    const Adjust* list = adjusts + d.adjust_at;
    uint low = 0, high = d.adjust_count;
    while (low < high) {
        uint middle = (low + high) / 2;
        if (list[middle].token < id) low = middle + 1;
        else high = middle;
    }
    for (; low < d.adjust_count && list[low].token == id; low++) {
        Adjust a = list[low];
        x = x > 0.0f ? DIVIDE(x, a.repetition) : x * a.repetition;
        x = x - a.frequency;
        x = x - a.presence;
        x = x + a.bias;
        if (x != x) x = -CLARY_INFINITY;
    }
    return x;
}

SHARED float gumbel(const Draw& d, uint id) {
    uint bits = philox_bits(id, d.position_low, d.position_high, d.choice, d.seed_low, d.seed_high) >> 9;
    float u = ((float)bits + 0.5f) * (1.0f / 8388608.0f);
    return -log_exact(-log_exact(u));
}

SHARED float warp_max(float x) {
    for (uint h = 16; h > 0; h >>= 1) {
        float y = __shfl_xor_sync(0xffffffffu, x, h);
        x = y > x ? y : x;
    }
    return x;
}
SHARED ulong warp_max_key(ulong x) {
    for (uint h = 16; h > 0; h >>= 1) x = max(x, __shfl_xor_sync(0xffffffffu, x, h));
    return x;
}
SHARED ulong warp_sum(ulong x) {
    for (uint h = 16; h > 0; h >>= 1) x += __shfl_xor_sync(0xffffffffu, x, h);
    return x;
}

// Over the block (a multiple of 32 threads, at most 1024); every thread gets the result. Barriers inside.
SHARED ulong block_max_key(ulong x, ulong* parts) {
    x = warp_max_key(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    ulong result = 0;
    for (uint w = 0; w < blockDim.x / 32; w++) result = max(result, parts[w]);
    return result;
}
SHARED ulong block_sum(ulong x, ulong* parts) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    ulong result = 0;
    for (uint w = 0; w < blockDim.x / 32; w++) result += parts[w];
    return result;
}
SHARED float block_max(float x, ulong* parts) {
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = BITS(x);
    __syncthreads();
    float result = -CLARY_INFINITY;
    for (uint w = 0; w < blockDim.x / 32; w++) {
        float y = FLOAT((uint)parts[w]);
        result = y > result ? y : result;
    }
    return result;
}

extern "C" __global__ void __launch_bounds__(256)
    draw_scores(const float* logits, uint width, const Draw* draws, const Adjust* adjusts, const uint*
                masks, Scratch s) {
    __shared__ ulong parts[32];
    wait_for_launches_before();
    start_next_launch();
    const Draw d = draws[blockIdx.y];
    const float* row = logits + (ulong)d.row * width;
    float* z = s.z + (ulong)blockIdx.y * s.chunks * CHUNK;
    uint magnitude = 0;
    ulong best = 0;
    float raw_top = -CLARY_INFINITY, z_top = -CLARY_INFINITY;
    // A warp takes chunks of 64 ids: two a lane, next to each other. All are asked for at once.
    float raws[IDS / 512][2];
#pragma unroll
    for (uint part = 0; part < IDS / 512; part++)
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            uint id = blockIdx.x * IDS + part * 512 + 2 * threadIdx.x + i;
            raws[part][i] = id < d.length ? row[id] : 0.0f;
        }
#pragma unroll
    for (uint part = 0; part < IDS / 512; part++) {
        uint id = blockIdx.x * IDS + part * 512 + 2 * threadIdx.x;
        float raw_max = -CLARY_INFINITY, z_max = -CLARY_INFINITY;
#pragma unroll
        for (uint i = id; i < id + 2; i++) {
            float x = -CLARY_INFINITY;
            if (i < d.length) {
                float raw = raws[part][i - id];
                magnitude = max(magnitude, BITS(raw) & 0x7fffffffu);
                raw_max = raw > raw_max ? raw : raw_max;
                x = d.adjust_count ? adjusted(raw, i, d, adjusts) : raw;
                if (!mask_allows(d, masks, i)) x = -CLARY_INFINITY;
                if (d.temperature != 0.0f) x = DIVIDE(x, d.temperature);
                best = max(best, pick_key(x, i));
            }
            if (d.temperature != 0.0f) z[i] = x;
            z_max = x > z_max ? x : z_max;
        }
        raw_max = warp_max(raw_max);
        z_max = warp_max(z_max);
        raw_top = raw_max > raw_top ? raw_max : raw_top;
        z_top = z_max > z_top ? z_max : z_top;
        if (threadIdx.x % 32 == 0) {
            ulong chunk = (ulong)blockIdx.y * s.chunks + id / CHUNK;
            s.raw_maxima[chunk] = raw_max;
            s.z_maxima[chunk] = z_max;
        }
    }
    magnitude = (uint)block_max_key(magnitude, parts);
    best = block_max_key(best, parts);
    raw_top = block_max(raw_top, parts);
    z_top = block_max(z_top, parts);
    if (threadIdx.x == 0) {
        ulong at = (ulong)blockIdx.y * s.blocks + blockIdx.x;
        s.raw_magnitude[at] = magnitude;
        s.best[at] = best;
        s.raw_tops[at] = raw_top, s.z_tops[at] = z_top;
    }
}

// Largest of the maxima of a draw's blocks.
SHARED float whole_max(const float* tops, uint blocks, ulong* parts) {
    float x = -CLARY_INFINITY;
    for (uint block = threadIdx.x; block < blocks; block += blockDim.x) x = tops[block] > x ? tops[block] : x;
    return block_max(x, parts);
}

extern "C" __global__ void __launch_bounds__(256)
    draw_weights(const float* logits, uint width, const Draw* draws, Scratch s) {
    __shared__ ulong parts[32];
    wait_for_launches_before();
    start_next_launch();
    const Draw d = draws[blockIdx.y];
    const float* row = logits + (ulong)d.row * width;
    const float* z = s.z + (ulong)blockIdx.y * s.chunks * CHUNK;
    bool sampled = d.temperature != 0.0f, cut = cuts(d);
    // Everything is asked for at once.
    float raws[IDS / 256], scores[IDS / 256];
#pragma unroll
    for (uint i = 0; i < IDS / 256; i++) {
        uint id = blockIdx.x * IDS + i * 256 + threadIdx.x;
        raws[i] = id < d.length ? row[id] : 0.0f;
        scores[i] = id < d.length && sampled ? z[id] : 0.0f;
    }
    ulong first_block = (ulong)blockIdx.y * s.blocks;
    float raw_max = whole_max(s.raw_tops + first_block, s.blocks, parts);
    float z_max = sampled ? whole_max(s.z_tops + first_block, s.blocks, parts) : 0.0f;
    ulong raw_sum = 0, z_sum = 0, best = 0;
#pragma unroll
    for (uint i = 0; i < IDS / 256; i++) {
        uint id = blockIdx.x * IDS + i * 256 + threadIdx.x;
        if (id >= d.length) continue;
        raw_sum += token_weight(raws[i] - raw_max);
        if (sampled && cut) z_sum += token_weight(scores[i] - z_max);
        if (sampled && !cut) best = max(best, pick_key(scores[i] + gumbel(d, id), id));
    }
    raw_sum = block_sum(raw_sum, parts);
    if (sampled) {
        z_sum = block_sum(z_sum, parts);
        best = block_max_key(best, parts);
    }
    if (threadIdx.x == 0) {
        ulong at = first_block + blockIdx.x;
        s.raw_weights[at] = raw_sum;
        s.z_weights[at] = z_sum;
        if (sampled && !cut) s.best[at] = best;
    }
}

// The smallest integer that is at least share * sum, exactly.
SHARED ulong share_of(float share, ulong sum) {
    if (!(share > 0.0f)) return 0;
    if (share >= 1.0f) return sum;
    int exponent = (int)(BITS(share) >> 23);
    uint fraction = BITS(share) & 0x7fffffu;
    uint mantissa = exponent == 0 ? fraction : fraction | 0x800000u;
    int shift = exponent == 0 ? 149 : 150 - exponent;
    unsigned __int128 product = (unsigned __int128)mantissa * sum;
    if (shift >= 128) return product > 0;
    return (ulong)((product + (((unsigned __int128)1 << shift) - 1)) >> shift);
}

// Candidates of a draw: a list in shared memory, or all ids where the list overflows. `keys` counts valid
// ones (above -inf). Values come back from `values`.
struct Candidates {
    const float* values;
    const ulong* list;
    uint count;   // of the list, or ids
    bool listed;
};

SHARED ulong candidate(const Candidates& c, uint i) {
    ulong key = c.listed ? c.list[i] : pick_key(c.values[i], i);
    return key >= KEY_MIN ? key : 0;
}

// Sums of one pass of a descent, by digit. Weights (at most 2^40) are added in four parts of 11 bits, so that
// 32-bit additions hold up to 2^21 of them.
struct Histogram {
    uint counts[256];
    uint parts[4][256];
    ulong least, most;  // keys of the whole descent
    ulong above;        // amount above the chosen digit
    uint digit;
    uint count;         // keys in the chosen digit
};

SHARED ulong amount_of(const Histogram& h, uint digit, bool weighted) {
    if (!weighted) return h.counts[digit];
    ulong sum = 0;
    for (int part = 3; part >= 0; part--) sum = (sum << 11) + h.parts[part][digit];
    return sum;
}

// By the first warp: the highest digit at which the amounts from the top reach `enough`, or 0.
SHARED void choose_digit(Histogram& h, ulong enough, bool weighted) {
    uint lane = threadIdx.x;
    ulong own = 0;
    for (uint i = 0; i < 8; i++) own += amount_of(h, 8 * lane + i, weighted);
    ulong from = own;  // amounts of this lane's digits and all above
    for (uint d = 1; d < 32; d <<= 1) {
        ulong more = __shfl_down_sync(0xffffffffu, from, d);
        if (lane + d < 32) from += more;
    }
    uint reached = __ballot_sync(0xffffffffu, from >= enough);
    if (lane != (reached ? 31 - __clz(reached) : 0)) return;
    ulong above = from - own;
    uint digit = 8 * lane + 7;
    for (; digit > 8 * lane; digit--) {
        ulong amount = amount_of(h, digit, weighted);
        if (above + amount >= enough) break;
        above += amount;
    }
    h.digit = digit;
    h.above = above;
    h.count = h.counts[digit];
}

// The largest key T such that the amounts of candidates with keys of at least T (and at least `least`) reach
// `enough` (at least 1); a key that leaves none out if they never do. Amount: 1, or the weight at z_max.
// Eight bits at a time from the highest in which the keys differ. All threads call it.
SHARED ulong descend(const Candidates& c, ulong least, ulong enough, bool weighted, float z_max,
                     Histogram& h) {
    __syncthreads();
    if (threadIdx.x == 0) h.least = ~0ull, h.most = 0;
    __syncthreads();
    ulong low = ~0ull, high = 0;
    for (uint i = threadIdx.x; i < c.count; i += blockDim.x) {
        ulong key = candidate(c, i);
        if (key == 0 || key < least) continue;
        low = min(low, key);
        high = max(high, key);
    }
    low = ~warp_max_key(~low);
    high = warp_max_key(high);
    if (threadIdx.x % 32 == 0 && high != 0) {
        atomicMin(&h.least, low);
        atomicMax(&h.most, high);
    }
    __syncthreads();
    low = h.least;
    high = h.most;
    if (high == 0) return 0;
    int bits = 64 - __clzll(low ^ high);
    ulong prefix = bits == 64 ? 0 : high >> bits << bits;
    while (bits > 0) {
        int width = bits < 8 ? bits : 8, shift = bits - width;
        __syncthreads();
        for (uint i = threadIdx.x; i < 256; i += blockDim.x) {
            h.counts[i] = 0;
            for (uint part = 0; part < 4; part++) h.parts[part][i] = 0;
        }
        __syncthreads();
        for (uint i = threadIdx.x; i < c.count; i += blockDim.x) {
            ulong key = candidate(c, i);
            if (key == 0 || key < least || (bits < 64 && (key ^ prefix) >> bits)) continue;
            uint digit = (uint)(key >> shift) & ((1u << width) - 1);
            atomicAdd(&h.counts[digit], 1u);
            if (!weighted) continue;
            ulong amount = token_weight(c.values[key_id(key)] - z_max);
            for (uint part = 0; part < 4; part++, amount >>= 11)
                if (amount & 2047) atomicAdd(&h.parts[part][digit], (uint)(amount & 2047));
        }
        __syncthreads();
        if (threadIdx.x < 32) choose_digit(h, enough, weighted);
        __syncthreads();
        prefix |= (ulong)h.digit << shift;
        enough -= h.above;
        bits = shift;
        if (h.count == 1) break;
    }
    // Of the keys that share the prefix one alone is left, or all its bits are known.
    ulong found = bits == 0 ? prefix : 0;
    __syncthreads();
    if (threadIdx.x == 0) h.most = 0;
    __syncthreads();
    for (uint i = threadIdx.x; bits > 0 && i < c.count; i += blockDim.x) {
        ulong key = candidate(c, i);
        if (key >= least && key != 0 && ((key ^ prefix) >> bits) == 0) atomicMax(&h.most, key);
    }
    __syncthreads();
    return bits > 0 ? h.most : found;
}

// The least value that may be among the `count` best: as many chunks reach it as values are wanted.
SHARED float bound_of_best(const float* maxima, uint chunks, uint count, Histogram& h, ulong* parts) {
    ulong valid = 0;
    for (uint i = threadIdx.x; i < chunks; i += blockDim.x) valid += maxima[i] > -CLARY_INFINITY;
    if (block_sum(valid, parts) < count) return -CLARY_INFINITY;
    Candidates of_maxima = {maxima, 0, chunks, false};
    ulong key = descend(of_maxima, 0, count, false, 0.0f, h);
    return maxima[key_id(key)];
}

// Collects the values of at least `bound`.
SHARED Candidates collect(const float* values, const float* maxima, uint chunks, uint length, float bound,
                          ulong* list, uint* used) {
    __syncthreads();
    if (threadIdx.x == 0) *used = 0;
    __syncthreads();
    for (uint chunk = threadIdx.x / 32; chunk < chunks; chunk += blockDim.x / 32) {
        if (!(maxima[chunk] >= bound)) continue;
        for (uint i = threadIdx.x % 32; i < CHUNK; i += 32) {
            uint id = chunk * CHUNK + i;
            if (id >= length || !(values[id] >= bound) || !(values[id] > -CLARY_INFINITY)) continue;
            uint at = atomicAdd(used, 1u);
            if (at < LIST) list[at] = pick_key(values[id], id);
        }
    }
    __syncthreads();
    bool listed = *used <= LIST;
    return Candidates{values, list, listed ? *used : length, listed};
}

// Sum of the weights of candidates with keys of at least `least`. All threads call it.
SHARED ulong weight_of(const Candidates& c, ulong least, float z_max, ulong* parts) {
    ulong sum = 0;
    for (uint i = threadIdx.x; i < c.count; i += blockDim.x) {
        ulong key = candidate(c, i);
        if (key != 0 && key >= least) sum += token_weight(c.values[key_id(key)] - z_max);
    }
    return block_sum(sum, parts);
}

SHARED ulong best_of(const Candidates& c, ulong* parts) {
    ulong best = 0;
    for (uint i = threadIdx.x; i < c.count; i += blockDim.x) best = max(best, candidate(c, i));
    return block_max_key(best, parts);
}

// The token's key of a draw with cuts; 0 where nothing is above -inf.
SHARED ulong choose(const Draw& d, const Scratch& s, ulong* list, uint* used, Histogram& h, ulong* parts) {
    const float* z = s.z + (ulong)blockIdx.x * s.chunks * CHUNK;
    const float* maxima = s.z_maxima + (ulong)blockIdx.x * s.chunks;
    float z_max = whole_max(s.z_tops + (ulong)blockIdx.x * s.blocks, s.blocks, parts);
    bool top_k = d.top_k != 0 && d.top_k < d.length;
    Candidates c;
    ulong least = 0, enough = 0;
    if (top_k) {
        float bound = bound_of_best(maxima, s.chunks, d.top_k, h, parts);
        c = collect(z, maxima, s.chunks, d.length, bound, list, used);
        least = descend(c, 0, d.top_k, false, z_max, h);
        if (d.top_p < 1.0f) enough = share_of(d.top_p, weight_of(c, least, z_max, parts));
    } else {
        // Below the last distance every weight is 0; less reaches far enough for most draws.
        if (d.top_p < 1.0f) {
            ulong sum = 0;
            for (uint b = threadIdx.x; b < s.blocks; b += blockDim.x)
                sum += s.z_weights[(ulong)blockIdx.x * s.blocks + b];
            enough = share_of(d.top_p, block_sum(sum, parts));
        }
        for (float distance = d.top_p < 1.0f ? 4.0f : 28.5f;; distance = distance * 2.0f) {
            bool last = distance > 28.0f;
            c = collect(z, maxima, s.chunks, d.length, z_max - (last ? 28.5f : distance), list, used);
            if (last || weight_of(c, 0, z_max, parts) >= enough) break;
        }
    }
    ulong best = best_of(c, parts);
    if (best == 0) return 0;
    if (d.top_p < 1.0f) least = enough == 0 ? best : max(least, descend(c, least, enough, true, z_max, h));
    ulong lightest = d.min_p > 0.0f ? share_of(d.min_p, token_weight(z[key_id(best)] - z_max)) : 0;
    ulong drawn = 0;
    for (uint i = threadIdx.x; i < c.count; i += blockDim.x) {
        ulong key = candidate(c, i);
        if (key == 0 || key < least) continue;
        uint id = key_id(key);
        if (key != best && token_weight(z[id] - z_max) < lightest) continue;
        drawn = max(drawn, pick_key(z[id] + gumbel(d, id), id));
    }
    return block_max_key(drawn, parts);
}

// Results: [token, state (0 drawn, 1 a logit is not finite), log-probability, count, then id and
// log-probability of each of the best], `stride` words a draw. `tokens`: the token of every draw, 0 where
// there is none.
extern "C" __global__ void __launch_bounds__(512, 1)
    draw_choose(const float* logits, uint width, const Draw* draws, const uint* masks, Scratch s, uint*
                results, uint stride, uint* tokens) {
    extern __shared__ ulong list[];
    __shared__ Histogram histogram;
    __shared__ ulong parts[32];
    __shared__ uint used, top_count;
    __shared__ ulong top[TOP_MAX];
    wait_for_launches_before();
    start_next_launch();
    const Draw d = draws[blockIdx.x];
    uint* out = results + (ulong)blockIdx.x * stride;
    ulong first_block = (ulong)blockIdx.x * s.blocks;
    const float* row = logits + (ulong)d.row * width;
    const float* raw_maxima = s.raw_maxima + (ulong)blockIdx.x * s.chunks;
    ulong magnitude = 0, sum = 0, token = 0;
    for (uint b = threadIdx.x; b < s.blocks; b += blockDim.x) {
        magnitude = max(magnitude, (ulong)s.raw_magnitude[first_block + b]);
        sum += s.raw_weights[first_block + b];
        token = max(token, s.best[first_block + b]);
    }
    magnitude = block_max_key(magnitude, parts);
    sum = block_sum(sum, parts);
    token = block_max_key(token, parts);
    float raw_max = whole_max(s.raw_tops + first_block, s.blocks, parts);
    if (magnitude >= 0x7f800000u) {
        if (threadIdx.x == 0) {
            out[0] = 0, out[1] = 1, out[2] = 0x7fc00000u, out[3] = 0;
            tokens[blockIdx.x] = 0;
        }
        return;
    }
    if (d.temperature != 0.0f && cuts(d)) token = choose(d, s, list, &used, histogram, parts);
    uint id = key_id(token);
    if (token < KEY_MIN) {
        // Every candidate is -inf: the lowest id that may be drawn.
        ulong lowest = 0;
        for (uint i = threadIdx.x; i < d.length; i += blockDim.x)
            if (mask_allows(d, masks, i)) lowest = max(lowest, (ulong)(uint)~i);
        id = ~(uint)block_max_key(lowest, parts);
    }
    float total = log_exact(__ull2float_rn(sum) * (1.0f / 1099511627776.0f));
    if (threadIdx.x == 0) {
        out[0] = tokens[blockIdx.x] = id;
        out[1] = 0;
        out[2] = BITS(id < d.length ? (row[id] - raw_max) - total : CLARY_NAN);
        out[3] = 0;
    }
    if (d.top == 0) return;
    __syncthreads();
    float bound = bound_of_best(raw_maxima, s.chunks, d.top, histogram, parts);
    Candidates c = collect(row, raw_maxima, s.chunks, d.length, bound, list, &used);
    ulong least = descend(c, 0, d.top, false, 0.0f, histogram);
    if (threadIdx.x == 0) top_count = 0;
    __syncthreads();
    for (uint i = threadIdx.x; i < c.count; i += blockDim.x) {
        ulong key = candidate(c, i);
        if (key != 0 && key >= least) {
            uint at = atomicAdd(&top_count, 1u);
            if (at < TOP_MAX) top[at] = key;
        }
    }
    __syncthreads();
    uint count = min(top_count, TOP_MAX);
    for (uint i = threadIdx.x; i < count; i += blockDim.x) {
        uint rank = 0;
        for (uint j = 0; j < count; j++) rank += top[j] > top[i];
        if (rank >= d.top) continue;
        out[4 + 2 * rank] = key_id(top[i]);
        out[5 + 2 * rank] = BITS((row[key_id(top[i])] - raw_max) - total);
    }
    if (threadIdx.x == 0) out[3] = min(count, d.top);
}
