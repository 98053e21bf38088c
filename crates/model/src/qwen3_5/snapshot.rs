//! Snapshots and pages, on the device and as bytes.
//!
//! Bytes of a snapshot: magic, then little-endian: length u64, pending 0 or 1 u32, width 4 or 8 u32 (f32
//! where every value is one, else f64), pages that the MTP layer skips u64, and if pending its three
//! positions u32 and `hidden` floats; then per delta-net layer the recurrent and the convolution state.
//! Floats have the width given.

use device::{DeltaState, PAGE_TOKENS};

use super::config::{Config, MixerKind};
use super::plan::state_bytes;
use super::qwen::Qwen;
use super::windows::limit;
use crate::{ModelError, SnapshotId};

const MAGIC: &[u8; 8] = b"clarysn2";
/// Magic, length, pending, width, pages skipped.
const HEAD_BYTES: usize = 32;

/// What the host keeps of a snapshot. Its states are on the device, at place `slots + id`, and the hidden
/// state of its pending row is row `id` of `scratch.mtp.saved`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Snapshot {
    pub(super) length: usize,
    /// Rotary position of the pending row.
    pub(super) pending: Option<[u32; 3]>,
    /// Leading pages that the MTP layer does not know.
    pub(super) base: usize,
}

/// A snapshot with everything in it.
struct Parsed {
    snapshot: Snapshot,
    /// Hidden state of the pending row, `[H]` or empty.
    hidden: Vec<f64>,
    /// One per delta-net layer.
    states: Vec<DeltaState>,
}

/// Bytes of a snapshot of f32 states.
pub(super) fn snapshot_bytes(config: &Config, mtp: bool) -> usize {
    let pending = if mtp { 12 + 4 * config.hidden } else { 0 };
    HEAD_BYTES + pending + state_bytes(config) as usize
}

impl Qwen {
    /// Place of a snapshot in the state pools.
    pub(super) fn snapshot_place(&self, id: SnapshotId) -> Result<u32, ModelError> {
        let count = self.snapshots.len();
        match (id.0 as usize) < count {
            true => Ok(self.settings.slots as u32 + id.0),
            false => Err(limit("snapshot", id.0, format!("below {count}"))),
        }
    }

    /// A snapshot that holds something.
    pub(super) fn saved(&self, id: SnapshotId) -> Result<&Snapshot, ModelError> {
        self.snapshot_place(id)?;
        let saved = self.snapshots[id.0 as usize].as_ref();
        saved.ok_or_else(|| limit("snapshot", format!("{} (empty)", id.0), "a saved one"))
    }

    pub(super) fn write_snapshot(&mut self, id: SnapshotId) -> Result<Vec<u8>, ModelError> {
        let Snapshot { length, pending, base } = *self.saved(id)?;
        let place = self.snapshot_place(id)?;
        let hidden = match (&self.network.scratch.mtp, pending) {
            (Some(mtp), Some(_)) => {
                let mut values = vec![0.0; self.network.config.hidden];
                self.device.read_exact(mtp.saved, id.0 as usize, &mut values)?;
                values
            }
            _ => Vec::new(),
        };
        let pools = self.network.pools.states.clone();
        let states =
            pools.iter().map(|pool| self.device.state_read(*pool, place)).collect::<Result<Vec<_>, _>>()?;
        let mut parts: Vec<&[f64]> = vec![&hidden];
        parts.extend(states.iter().flat_map(|state| [&state.recurrent[..], &state.conv[..]]));
        let narrow = parts.iter().all(|part| part.iter().all(|x| is_f32(*x)));
        let width = if narrow { 4 } else { 8 };
        let mut bytes = Vec::new();
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&(length as u64).to_le_bytes());
        bytes.extend_from_slice(&u32::from(pending.is_some()).to_le_bytes());
        bytes.extend_from_slice(&(width as u32).to_le_bytes());
        bytes.extend_from_slice(&(base as u64).to_le_bytes());
        if let Some(position) = pending {
            position.iter().for_each(|p| bytes.extend_from_slice(&p.to_le_bytes()));
        }
        for value in parts.into_iter().flatten() {
            match narrow {
                true => bytes.extend_from_slice(&(*value as f32).to_le_bytes()),
                false => bytes.extend_from_slice(&value.to_le_bytes()),
            }
        }
        Ok(bytes)
    }

    pub(super) fn read_snapshot(&mut self, id: SnapshotId, bytes: &[u8]) -> Result<(), ModelError> {
        let place = self.snapshot_place(id)?;
        let config = &self.network.config;
        let parsed = parse(bytes, config, self.network.weights.mtp.is_some());
        let Parsed { snapshot, hidden, states } = parsed.ok_or_else(|| {
            let expected = "a snapshot that this model exported, with the same MTP setting";
            limit("snapshot", format!("{} other bytes", bytes.len()), expected)
        })?;
        if snapshot.length > self.settings.context {
            let expected = format!("at most {}", self.settings.context);
            return Err(limit("tokens of a snapshot", snapshot.length, expected));
        }
        // Until all layers are written the place holds no snapshot.
        self.snapshots[id.0 as usize] = None;
        for (pool, state) in self.network.pools.states.iter().zip(&states) {
            self.device.state_write(*pool, place, state)?;
        }
        if let (Some(mtp), Some(_)) = (&self.network.scratch.mtp, snapshot.pending) {
            self.device.write(mtp.saved, id.0 as usize, &hidden)?;
        }
        self.snapshots[id.0 as usize] = Some(snapshot);
        Ok(())
    }

    pub(super) fn write_page(&mut self, page: u32) -> Result<Vec<u8>, ModelError> {
        self.check_page(page)?;
        let mut bytes = Vec::new();
        for pool in &self.network.pools.kv {
            bytes.extend(self.device.kv_export(*pool, page)?);
        }
        Ok(bytes)
    }

    pub(super) fn read_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), ModelError> {
        self.check_page(page)?;
        // All pools have one shape, so a page is equal parts.
        let pools = &self.network.pools.kv;
        if pools.is_empty() && bytes.is_empty() {
            return Ok(());
        }
        if bytes.is_empty() || pools.is_empty() || !bytes.len().is_multiple_of(pools.len()) {
            let expected = format!("{} equal parts", pools.len());
            return Err(limit("bytes of a page", bytes.len(), expected));
        }
        for (pool, part) in pools.iter().zip(bytes.chunks_exact(bytes.len() / pools.len())) {
            self.device.kv_import(*pool, page, part)?;
        }
        Ok(())
    }

    fn check_page(&self, page: u32) -> Result<(), ModelError> {
        super::windows::check_pages(&[page], &self.settings)
    }
}

fn is_f32(value: f64) -> bool {
    f64::from(value as f32).to_bits() == value.to_bits() || value.is_nan()
}

/// The snapshot; `None` if the bytes are anything else.
fn parse(bytes: &[u8], config: &Config, mtp: bool) -> Option<Parsed> {
    let mut reader = Reader { rest: bytes.strip_prefix(MAGIC)?, width: 0 };
    let length = usize::try_from(u64::from_le_bytes(*reader.take::<8>()?)).ok()?;
    let pending = reader.word()?;
    reader.width = reader.word()? as usize;
    let base = usize::try_from(u64::from_le_bytes(*reader.take::<8>()?)).ok()?;
    // The page of the pending row is known.
    if base > length.saturating_sub(1) / PAGE_TOKENS {
        return None;
    }
    // A sequence with MTP has a pending row unless it is empty.
    if pending != u32::from(mtp && length > 0) || ![4, 8].contains(&reader.width) {
        return None;
    }
    let layers = config.layers_of(MixerKind::DeltaNet).count();
    let floats = layers * (config.delta.recurrent() + config.delta.conv());
    let width = pending as usize * config.hidden;
    if reader.rest.len() != 12 * pending as usize + (width + floats) * reader.width {
        return None;
    }
    let pending = match pending {
        0 => None,
        _ => Some([reader.word()?, reader.word()?, reader.word()?]),
    };
    let hidden = reader.floats(width)?;
    let state = |reader: &mut Reader<'_>| {
        let recurrent = reader.floats(config.delta.recurrent())?;
        Some(DeltaState { recurrent, conv: reader.floats(config.delta.conv())? })
    };
    let states = (0..layers).map(|_| state(&mut reader)).collect::<Option<Vec<_>>>()?;
    Some(Parsed { snapshot: Snapshot { length, pending, base }, hidden, states })
}

struct Reader<'a> {
    rest: &'a [u8],
    width: usize,
}

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Option<&'a [u8; N]> {
        let (head, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(head)
    }

    fn word(&mut self) -> Option<u32> {
        self.take().map(|bytes| u32::from_le_bytes(*bytes))
    }

    fn floats(&mut self, count: usize) -> Option<Vec<f64>> {
        let read = |reader: &mut Self| match reader.width {
            4 => reader.take().map(|bytes| f64::from(f32::from_le_bytes(*bytes))),
            _ => reader.take().map(|bytes| f64::from_le_bytes(*bytes)),
        };
        (0..count).map(|_| read(self)).collect()
    }
}
