//! Bit streams of codes: little-endian, lowest bits first, no padding (formats.md section 4).

/// Reads `out.len()` codes of `bits` bits, a multiple of 8 of them.
///
/// # Panics
/// If `stream` is shorter than `out.len() * bits / 8` bytes or the count is not a multiple of 8.
pub fn unpack_codes(bits: u8, stream: &[u8], out: &mut [u8]) {
    assert!(out.len().is_multiple_of(8), "codes come in eights");
    let bits = bits as usize;
    let mask = (1u64 << bits) - 1;
    let stream = &stream[..out.len() / 8 * bits];
    for (codes, bytes) in out.chunks_exact_mut(8).zip(stream.chunks_exact(bits)) {
        let mut word = [0u8; 8];
        word[..bits].copy_from_slice(bytes);
        let word = u64::from_le_bytes(word);
        for (j, code) in codes.iter_mut().enumerate() {
            *code = ((word >> (j * bits)) & mask) as u8;
        }
    }
}

/// Writes codes as a bit stream: the inverse of [`unpack_codes`]. Bits above `bits` are dropped.
///
/// # Panics
/// If the count is not a multiple of 8.
pub fn pack_codes(bits: u8, codes: &[u8], out: &mut Vec<u8>) {
    assert!(codes.len().is_multiple_of(8), "codes come in eights");
    let bits = bits as usize;
    let mask = (1u64 << bits) - 1;
    for eight in codes.chunks_exact(8) {
        let word = eight.iter().enumerate().fold(0u64, |w, (j, &c)| w | ((c as u64 & mask) << (j * bits)));
        out.extend_from_slice(&word.to_le_bytes()[..bits]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BITS_SUPPORTED;

    #[test]
    fn the_published_example_reads() {
        let mut codes = [0; 8];
        unpack_codes(3, &[0x35, 0x46, 0x45], &mut codes);
        assert_eq!(codes, [5, 6, 0, 3, 4, 2, 1, 2]);
    }

    #[test]
    fn every_width_round_trips() {
        for bits in BITS_SUPPORTED {
            let codes: Vec<u8> = (0..256u32).map(|i| (i * 37 % (1 << bits)) as u8).collect();
            let mut stream = Vec::new();
            pack_codes(bits, &codes, &mut stream);
            assert_eq!(stream.len(), codes.len() * bits as usize / 8);
            let mut back = vec![0; codes.len()];
            unpack_codes(bits, &stream, &mut back);
            assert_eq!(back, codes);
        }
    }
}
