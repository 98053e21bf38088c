// Where K/V codes lie (crates/device/src/cuda/kv.rs has the host's half), and how a head is quantized into
// them.
//
// A page has a block per K/V head. Codes are signed bytes, one digit plane for int8 and two for int16
// (code = 256 high + low, high first); head dims are padded with zeros to whole groups of 64:
// * K: [digit][group][64 keys][64 dims];
// * V: [digit][dim][64 keys], keys in the order of value_slot: what a lane of the matrix instruction reads
// lies
//   together;
// * scales, apart from the codes: [group][64 keys] of K, then [64 keys] of V.
#pragma once
#include "step.cuh"

typedef signed char schar;

#define KEYS 64

// Pages of a layer; a kernel takes it by value.
struct KvPool {
    schar* codes;
    float* scales;
    uint kv_heads, head_dim, digits, groups;
};

// Bytes of one digit plane of K; V has as many.
SHARED uint plane_of(const KvPool& pool) { return pool.groups * KEYS * 64; }

// One head's block.
struct KvBlock {
    schar* codes;
    float* scales;
};

SHARED KvBlock kv_block(const KvPool& pool, uint page, uint head) {
    ulong at = (ulong)page * pool.kv_heads + head;
    return KvBlock{pool.codes + at * (2 * pool.digits * plane_of(pool)),
                   pool.scales + at * ((pool.groups + 1) * KEYS)};
}

// Where a key lies in a row of V: a lane of the matrix instruction has the keys 8 t + 2 c + e of one c.
SHARED uint value_slot(uint key) { return key % 8 / 2 * 16 + key / 8 * 2 + key % 2; }

// Byte of K's `dim` of `key`.
SHARED uint key_at(uint plane, uint digit, uint key, uint dim) {
    return digit * plane + dim / 64 * (KEYS * 64) + key * 64 + dim % 64;
}

// Byte of V's `dim` of `key`.
SHARED uint value_at(uint plane, uint digits, uint digit, uint key, uint dim) {
    return (digits + digit) * plane + dim * KEYS + value_slot(key);
}

// Scale and factor to codes of a group whose magnitude has these bits (crates/device/src/cpu/kv.rs).
struct KvQuantizer {
    float scale, to_code;
};

SHARED KvQuantizer kv_quantizer(uint magnitude, float limit) {
    if (magnitude < CLARY_MAGNITUDE_MIN_BITS) return KvQuantizer{0.0f, 0.0f};
    if (magnitude >= CLARY_MAGNITUDE_MAX_BITS) return KvQuantizer{CLARY_NAN, 0.0f};
    float m = FLOAT(magnitude);
    return KvQuantizer{DIVIDE(m, limit), DIVIDE(limit, m)};
}

SHARED int kv_code(const KvQuantizer& quantizer, float x) {
    if (quantizer.to_code == 0.0f) return 0;  // x may be infinite or NaN here
    return (int)(BITS(x * quantizer.to_code + CLARY_ROUND) - BITS(CLARY_ROUND));
}

SHARED uint warp_max(uint x) { return __reduce_max_sync(0xffffffffu, x); }

// Heads of up to 256 dims: lane t of a warp has the dims t + 32 i.
#define HEAD_VALUES 8

SHARED void load_head(float (&x)[HEAD_VALUES], const float* from, uint head_dim) {
    uint lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < HEAD_VALUES; i++) x[i] = lane + 32 * i < head_dim ? from[lane + 32 * i] : 0.0f;
}

SHARED float limit_of(uint digits) { return digits == 1 ? 127.0f : 32639.0f; }

// Quantizes a head of K into key `key` of a block; all lanes of a warp.
SHARED void store_key(const float (&x)[HEAD_VALUES], const KvPool& pool, const KvBlock& block, uint key) {
    uint lane = threadIdx.x % 32, plane = plane_of(pool);
#pragma unroll
    for (int g = 0; g < HEAD_VALUES / 2; g++) {
        if (g >= pool.groups) break;
        uint magnitude = max(BITS(x[2 * g]) & 0x7fffffffu, BITS(x[2 * g + 1]) & 0x7fffffffu);
        KvQuantizer quantizer = kv_quantizer(warp_max(magnitude), limit_of(pool.digits));
        if (lane == 0) block.scales[g * KEYS + key] = quantizer.scale;
#pragma unroll
        for (int i = 2 * g; i < 2 * g + 2; i++) {
            int code = kv_code(quantizer, x[i]);
            schar* to = block.codes + key_at(plane, 0, key, lane + 32 * i);
            schar low = (schar)code;
            if (pool.digits == 1) {
                *to = low;
            } else {
                *to = (schar)((code - low) >> 8);
                to[plane] = low;
            }
        }
    }
}

// Quantizes a head of V into key `key` of a block; all lanes of a warp.
SHARED void store_value(const float (&x)[HEAD_VALUES], const KvPool& pool, const KvBlock& block, uint key) {
    uint lane = threadIdx.x % 32, plane = plane_of(pool), magnitude = 0;
#pragma unroll
    for (int i = 0; i < HEAD_VALUES; i++) magnitude = max(magnitude, BITS(x[i]) & 0x7fffffffu);
    KvQuantizer quantizer = kv_quantizer(warp_max(magnitude), limit_of(pool.digits));
    if (lane == 0) block.scales[pool.groups * KEYS + key] = quantizer.scale;
#pragma unroll
    for (int i = 0; i < HEAD_VALUES; i++) {
        if (i >= 2 * pool.groups) break;
        int code = kv_code(quantizer, x[i]);
        schar* to = block.codes + value_at(plane, pool.digits, 0, key, lane + 32 * i);
        schar low = (schar)code;
        if (pool.digits == 1) {
            *to = low;
        } else {
            *to = (schar)((code - low) >> 8);
            to[plane] = low;
        }
    }
}

// Digits of a code in [-2^15, 2^15), as bytes: code = 256 high + low.
SHARED void split_code(int code, schar& high, schar& low) {
    low = (schar)code;
    high = (schar)((code - low) >> 8);
}

// Q_11 of a query head in groups of 64, as digits [groups, high and low, 64] and units [groups]; all lanes of
// a warp.
SHARED void store_query(const float (&x)[HEAD_VALUES], schar* digits, float* units, uint groups) {
    uint lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < HEAD_VALUES / 2; g++) {
        if (g >= groups) break;
        uint magnitude = warp_max(max(BITS(x[2 * g]) & 0x7fffffffu, BITS(x[2 * g + 1]) & 0x7fffffffu));
        float factor = quantize_factor(11, magnitude);
        if (lane == 0) units[g] = quantize_unit(11, magnitude);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int code = factor == 0.0f ? 0 : __float2int_rn(x[2 * g + i] * factor);
            schar high, low;
            split_code(code, high, low);
            digits[g * 128 + lane + 32 * i] = high;
            digits[g * 128 + 64 + lane + 32 * i] = low;
        }
    }
}
