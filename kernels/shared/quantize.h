// Q_G of docs/arithmetic.md for one value: a port of crates/quant/src/quantize.rs. Needs math.h before it.
#ifndef CLARY_SHARED_QUANTIZE_H
#define CLARY_SHARED_QUANTIZE_H

#define CLARY_MAGNITUDE_MIN_BITS ((127u - 40u) << 23)
#define CLARY_MAGNITUDE_MAX_BITS ((127u + 40u) << 23)

// Factor from values to codes of a group with this magnitude (bits of max |x|); 0 for groups of zero codes.
SHARED float quantize_factor(int bits, uint magnitude) {
    if (magnitude < CLARY_MAGNITUDE_MIN_BITS || magnitude >= CLARY_MAGNITUDE_MAX_BITS) return 0.0f;
    return power_of_two(bits - ((int)(magnitude >> 23) - 126));
}

// Unit of the group: value = code * unit; 0 below 2^-40, NaN for a fault.
SHARED float quantize_unit(int bits, uint magnitude) {
    if (magnitude < CLARY_MAGNITUDE_MIN_BITS) return 0.0f;
    if (magnitude >= CLARY_MAGNITUDE_MAX_BITS) return CLARY_NAN;
    return power_of_two((int)(magnitude >> 23) - 126 - bits);
}

// The code of x as an integer-valued float, |code| <= 2^bits with 11 significant bits. A factor of 0 gives 0.
SHARED float quantize_code(float x, float factor) {
    if (factor == 0.0f) return 0.0f;
    float t = x * factor;
    uint exponent = (BITS(t) >> 23) & 0xffu;
    // Values below 2^11 round to integers, others to 11 significant bits. Adding 1.5 * 2^(23 + step) rounds
    // to multiples of 2^step.
    int step = exponent > 137u ? (int)exponent - 137 : 0;
    float shift = FLOAT(((uint)(23 + step + 127) << 23) | 0x400000u);
    return (t + shift) - shift;
}

#endif
