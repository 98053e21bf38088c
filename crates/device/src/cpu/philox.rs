//! Philox-4x32 with 10 rounds (Salmon et al., 2011): the counter-based generator of draws.

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// Seed and all of the counter but the token id.
pub(crate) struct Key {
    seed: [u32; 2],
    position: [u32; 2],
    choice: u32,
}

impl Key {
    /// Key = seed (low, high word); counter = (token, position low, position high, choice).
    pub(crate) fn new(seed: u64, choice: u32, position: u64) -> Self {
        let words = |x: u64| [x as u32, (x >> 32) as u32];
        Self { seed: words(seed), position: words(position), choice }
    }

    /// First output word for a token.
    #[inline(always)]
    pub(crate) fn bits(&self, token: u32) -> u32 {
        rounds([token, self.position[0], self.position[1], self.choice], self.seed)[0]
    }
}

#[inline(always)]
fn rounds(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let a = MULTIPLIERS[0] as u64 * counter[0] as u64;
        let b = MULTIPLIERS[1] as u64 * counter[2] as u64;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution.
    #[test]
    fn known_answers() {
        assert_eq!(rounds([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            rounds([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            rounds(pi, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
