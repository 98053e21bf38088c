//! A digest that names a model without reading all of it.

use std::ops::Range;

use sha2::{Digest, Sha256};

use crate::{Error, folder::Folder, locate::Part};

/// Bytes taken of each stretch of a file.
pub const SAMPLE_BYTES: usize = 4 << 10;
/// Length of a stretch, bytes.
pub const SAMPLE_EVERY: usize = 1 << 20;

/// See [`crate::Checkpoint::fingerprint`]. Every length stands before what it is the length of, so that no
/// two folders give the same bytes.
pub(crate) fn fingerprint(folder: &Folder) -> Result<[u8; 32], Error> {
    let mut hash = Sha256::new();
    part(&mut hash, folder.config.value().to_string().as_bytes());
    let mut files: Vec<usize> = (0..folder.files.len()).collect();
    files.sort_by(|&a, &b| folder.files[a].name.cmp(&folder.files[b].name));
    for file in files {
        let (name, bytes) = (&folder.files[file].name, folder.files[file].bytes as usize);
        let read = |range: Range<usize>| folder.bytes(&Part { file, range });
        part(&mut hash, name.as_bytes());
        hash.update((bytes as u64).to_le_bytes());
        let length = read(0..8)?.first_chunk::<8>().map_or(0, |length| u64::from_le_bytes(*length));
        let data = bytes.min(usize::try_from(length).unwrap_or(bytes).saturating_add(8));
        part(&mut hash, &read(8..data)?);
        for at in (data..bytes).step_by(SAMPLE_EVERY) {
            hash.update(&*read(at..bytes.min(at + SAMPLE_BYTES))?);
        }
    }
    Ok(hash.finalize().into())
}

fn part(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}
