//! A digest that names a model without reading all of it.

use quant::Storage;
use sha2::{Digest, Sha256};

use crate::folder::Folder;

/// Bytes taken of each stretch of a file.
pub const SAMPLE_BYTES: usize = 4 << 10;
/// Length of a stretch, bytes.
pub const SAMPLE_EVERY: usize = 1 << 20;

/// See [`crate::Checkpoint::fingerprint`]. Every length stands before what it is the length of, so that no
/// two folders give the same bytes.
pub(crate) fn fingerprint(folder: &Folder) -> [u8; 32] {
    let mut hash = Sha256::new();
    part(&mut hash, folder.config.value().to_string().as_bytes());
    let mut files: Vec<_> = folder.files.iter().collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    for file in files {
        let bytes = file.bytes();
        part(&mut hash, file.name.as_bytes());
        hash.update((bytes.len() as u64).to_le_bytes());
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap_or((&[0; 8], bytes));
        let header = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(0).min(rest.len());
        let (header, data) = rest.split_at(header);
        part(&mut hash, header);
        data.chunks(SAMPLE_EVERY).for_each(|piece| hash.update(&piece[..piece.len().min(SAMPLE_BYTES)]));
    }
    hash.finalize().into()
}

fn part(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}
