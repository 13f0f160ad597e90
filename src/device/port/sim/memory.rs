//! The software NPU's memory: buffers in domains, seen by two sides that agree only after a sync.
//!
//! What the CPU writes is `unsynced` until it is shown to the device, and a program that meets such bytes is an
//! error: silicon would read what was there before. What the device writes is in a copy of its own until it is
//! shown to the CPU, which reads what was there before, as on silicon.

use std::collections::BTreeMap;
use std::ops::Range;

use super::iova::{Iova, PAGE};
use crate::device::port::{Buffer, BufferId, Direction, PortError};

/// All buffers of all domains.
#[derive(Debug)]
pub(super) struct Memory {
    buffers: BTreeMap<BufferId, Stored>,
    domains: Vec<Domain>,
    created: u64,
    /// Bytes that may be mapped in one domain, and in all together.
    ceiling: u64,
    ram: u64,
}

#[derive(Debug)]
struct Domain {
    free: Iova,
    /// Buffers by their first address.
    placed: BTreeMap<u32, BufferId>,
    mapped: u64,
}

#[derive(Debug)]
struct Stored {
    buffer: Buffer,
    /// As the CPU sees it; in words, so that results in it are aligned.
    cpu: Vec<u64>,
    /// As the device sees it, once it has written.
    device: Option<Vec<u64>>,
    /// What the CPU wrote and the device does not see. All of a fresh buffer.
    unsynced: Vec<Range<u64>>,
}

impl Stored {
    /// Mapped bytes: whole pages.
    fn mapped(&self) -> u64 {
        self.buffer.bytes.next_multiple_of(PAGE)
    }

    fn seen_by_device(&self) -> &[u8] {
        bytemuck::cast_slice(self.device.as_ref().unwrap_or(&self.cpu))
    }

    fn check(&self, range: &Range<u64>) -> Result<Range<usize>, PortError> {
        let bytes = self.buffer.bytes;
        if range.start > range.end || range.end > bytes {
            return Err(PortError::OutOfBuffer { start: range.start, end: range.end, bytes });
        }
        Ok(range.start as usize..range.end as usize)
    }
}

/// Bytes as a program addresses them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) id: BufferId,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Memory {
    pub(super) fn new(domains: u32, domain_bytes: u64, ceiling: u64, ram: u64) -> Memory {
        let domain = |_| Domain { free: Iova::new(domain_bytes), placed: BTreeMap::new(), mapped: 0 };
        Memory {
            buffers: BTreeMap::new(),
            domains: (0..domains).map(domain).collect(),
            created: 0,
            ceiling,
            ram,
        }
    }

    pub(super) fn n_domains(&self) -> usize {
        self.domains.len()
    }

    /// Bytes and buffers mapped in a domain.
    pub(super) fn mapped(&self, domain: u32) -> (u64, usize) {
        self.domains.get(domain as usize).map_or((0, 0), |domain| (domain.mapped, domain.placed.len()))
    }

    pub(super) fn create(&mut self, bytes: u64, domain: u32) -> Result<Buffer, PortError> {
        let all: u64 = self.domains.iter().map(|domain| domain.mapped).sum();
        let len = bytes.checked_next_multiple_of(PAGE).filter(|len| *len > 0);
        let len = len.ok_or_else(|| PortError::Refused(format!("a buffer of {bytes} bytes")))?;
        if len > self.ram.saturating_sub(all) {
            return Err(PortError::NoMemory { bytes });
        }
        let (index, ceiling) = (domain, self.ceiling);
        let domain = self.domains.get_mut(index as usize);
        let domain = domain.ok_or_else(|| PortError::Refused(format!("domain {index}")))?;
        let no_iova = PortError::NoIova { domain: index, bytes };
        if len > ceiling.saturating_sub(domain.mapped) {
            return Err(no_iova);
        }
        let iova = domain.free.take(len).ok_or(no_iova)?;
        let buffer = Buffer { id: BufferId(self.created), iova, domain: index, bytes };
        self.created += 1;
        domain.placed.insert(iova, buffer.id);
        domain.mapped += len;
        let cpu = vec![0; len as usize / 8];
        self.buffers.insert(
            buffer.id,
            Stored { buffer, cpu, device: None, unsynced: Vec::from([Range { start: 0, end: len }]) },
        );
        Ok(buffer)
    }

    pub(super) fn destroy(&mut self, id: BufferId) -> Result<(), PortError> {
        let stored = self.buffers.remove(&id).ok_or(PortError::NoBuffer(id.0))?;
        let domain = &mut self.domains[stored.buffer.domain as usize];
        domain.placed.remove(&stored.buffer.iova);
        domain.free.give(stored.buffer.iova, stored.mapped());
        domain.mapped -= stored.mapped();
        Ok(())
    }

    pub(super) fn buffer(&self, id: BufferId) -> Result<Buffer, PortError> {
        self.stored(id).map(|stored| stored.buffer)
    }

    fn stored(&self, id: BufferId) -> Result<&Stored, PortError> {
        self.buffers.get(&id).ok_or(PortError::NoBuffer(id.0))
    }

    /// The bytes that the CPU is about to write.
    pub(super) fn write(&mut self, id: BufferId, range: Range<u64>) -> Result<&mut [u8], PortError> {
        let stored = self.buffers.get_mut(&id).ok_or(PortError::NoBuffer(id.0))?;
        let bytes = stored.check(&range)?;
        stored.unsynced.push(range);
        Ok(&mut bytemuck::cast_slice_mut(&mut stored.cpu)[bytes])
    }

    /// The bytes as the CPU sees them.
    pub(super) fn read(&self, id: BufferId, range: &Range<u64>) -> Result<&[u8], PortError> {
        let stored = self.stored(id)?;
        Ok(&bytemuck::cast_slice(&stored.cpu)[stored.check(range)?])
    }

    pub(super) fn sync(
        &mut self,
        id: BufferId,
        range: Range<u64>,
        direction: Direction,
    ) -> Result<(), PortError> {
        let stored = self.buffers.get_mut(&id).ok_or(PortError::NoBuffer(id.0))?;
        let bytes = stored.check(&range)?;
        let cpu: &mut [u8] = bytemuck::cast_slice_mut(&mut stored.cpu);
        let device = stored.device.as_mut().map(|device| bytemuck::cast_slice_mut::<u64, u8>(device));
        match (direction, device) {
            (Direction::FromDevice, Some(device)) => cpu[bytes.clone()].copy_from_slice(&device[bytes]),
            (Direction::ToDevice, Some(device)) => device[bytes.clone()].copy_from_slice(&cpu[bytes]),
            (_, None) => {}
        }
        if direction == Direction::ToDevice {
            let split =
                |old: &Range<u64>| [old.start..old.end.min(range.start), old.start.max(range.end)..old.end];
            stored.unsynced =
                stored.unsynced.iter().flat_map(split).filter(|left| !left.is_empty()).collect();
        }
        Ok(())
    }

    /// What a program's address means in a domain.
    pub(super) fn resolve(&self, domain: u32, address: u32, len: u64) -> Result<Span, String> {
        let unmapped =
            || format!("address {address:#010x} and {len} bytes are not mapped in domain {domain}");
        let space = self.domains.get(domain as usize).ok_or_else(unmapped)?;
        let (&start, &id) = space.placed.range(..=address).next_back().ok_or_else(unmapped)?;
        let offset = u64::from(address - start);
        let mapped = self.buffers.get(&id).map_or(0, Stored::mapped);
        if offset.saturating_add(len) > mapped { Err(unmapped()) } else { Ok(Span { id, offset, len }) }
    }

    /// The bytes as the device sees them; an error where it does not see what the CPU wrote.
    pub(super) fn device_read(&self, span: Span) -> Result<&[u8], String> {
        let stored = self.stored(span.id).map_err(|error| error.to_string())?;
        let range = span.offset..span.offset + span.len;
        if stored.unsynced.iter().any(|left| left.start < range.end && range.start < left.end) {
            return Err(format!("bytes {range:?} of buffer {} were never synced to the device", span.id.0));
        }
        let bytes = stored.seen_by_device().get(range.start as usize..range.end as usize);
        bytes.ok_or_else(|| format!("bytes {range:?} of a buffer of {}", stored.mapped()))
    }

    /// Takes the device's view of a buffer out, to be put back after it has been written.
    pub(super) fn take_device_view(&mut self, id: BufferId) -> Vec<u64> {
        let Some(stored) = self.buffers.get_mut(&id) else { return Vec::new() };
        stored.device.take().unwrap_or_else(|| stored.cpu.clone())
    }

    /// Puts a device's view back.
    pub(super) fn put_device_view(&mut self, id: BufferId, view: Vec<u64>) {
        if let Some(stored) = self.buffers.get_mut(&id) {
            stored.device = Some(view);
        }
    }
}
