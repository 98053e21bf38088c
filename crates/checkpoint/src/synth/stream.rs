//! Counter-based random bytes: any part of any tensor, in any order, from a seed and a name.

/// An endless sequence of random words; word `i` depends on nothing but seed, name and `i`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    key: u64,
}

/// Odd constant of the golden ratio: steps between counters (SplitMix64).
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of SplitMix64.
#[inline(always)]
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Stream {
    /// The stream of one part of one tensor.
    pub(crate) fn new(seed: u64, name: &str, part: &str) -> Self {
        // FNV-1a over the names, with a byte between them that is in neither.
        let fold = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
        let bytes = name.bytes().chain([0xff]).chain(part.bytes());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325, fold);
        Self { key: mix(mix(seed.wrapping_add(STEP)) ^ hash) }
    }

    /// Word `index`.
    #[inline(always)]
    pub(crate) fn word(self, index: u64) -> u64 {
        mix(self.key.wrapping_add(index.wrapping_mul(STEP)))
    }

    /// Fills `out` with the bytes from word `first` on.
    pub(crate) fn fill(self, first: u64, out: &mut [u8]) {
        let (words, rest) = out.as_chunks_mut::<8>();
        let count = words.len() as u64;
        for (index, word) in (first..).zip(words) {
            *word = self.word(index).to_le_bytes();
        }
        let last = self.word(first + count).to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }

    /// Number `index` of an even distribution over `[0, 1)`, exact in f32.
    pub(crate) fn unit(self, index: u64) -> f32 {
        (self.word(index) >> 40) as f32 / (1u32 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_stream_join() {
        let stream = Stream::new(1, "a", "codes");
        let mut whole = [0; 1003];
        stream.fill(0, &mut whole);
        for words in [1usize, 7, 125] {
            let mut part = [0; 3];
            stream.fill(words as u64, &mut part);
            assert_eq!(part, whole[words * 8..words * 8 + 3]);
        }
    }

    #[test]
    fn keys_differ() {
        let first = |seed, name, part| Stream::new(seed, name, part).word(0);
        let base = first(1, "ab", "c");
        assert!([first(2, "ab", "c"), first(1, "a", "bc"), first(1, "ab", "d")].iter().all(|&w| w != base));
    }

    #[test]
    fn bits_are_even() {
        let mut bytes = vec![0; 1 << 20];
        Stream::new(3, "t", "codes").fill(0, &mut bytes);
        for bit in 0..8 {
            let ones = bytes.iter().filter(|&&b| b >> bit & 1 == 1).count() as f64;
            assert!((ones / bytes.len() as f64 - 0.5).abs() < 0.003, "bit {bit}: {ones}");
        }
    }
}
