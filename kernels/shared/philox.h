// Philox-4x32 with 10 rounds: a port of crates/device/src/cpu/philox.rs. Needs SHARED, uint and ulong.
#ifndef CLARY_SHARED_PHILOX_H
#define CLARY_SHARED_PHILOX_H

// First output word for (token, position low, position high, choice) under the seed.
SHARED uint philox_bits(uint token, uint position_low, uint position_high, uint choice, uint seed_low,
                        uint seed_high) {
    uint c0 = token, c1 = position_low, c2 = position_high, c3 = choice;
    uint k0 = seed_low, k1 = seed_high;
    for (int round = 0; round < 10; round++) {
        ulong a = (ulong)0xd2511f53u * c0;
        ulong b = (ulong)0xcd9e8d57u * c2;
        c0 = (uint)(b >> 32) ^ c1 ^ k0;
        c1 = (uint)b;
        c2 = (uint)(a >> 32) ^ c3 ^ k1;
        c3 = (uint)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return c0;
}

#endif
