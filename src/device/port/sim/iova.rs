//! The addresses of one domain: top-down first fit over whole pages, as the kernel's allocator hands them out.

use std::collections::BTreeMap;

/// One IOMMU page. Source: docs/npu.md, "IOVA window". Confidence: read in source.
pub(super) const PAGE: u64 = 4096;

/// Addresses are 32 bits wide.
const END: u64 = 1 << 32;

/// The free addresses: length of each gap by its start. Gaps never touch.
#[derive(Debug)]
pub(super) struct Iova {
    gaps: BTreeMap<u64, u64>,
}

impl Iova {
    /// A domain of `bytes`, from page 1 upwards; page 0 is never handed out.
    pub(super) fn new(bytes: u64) -> Iova {
        let len = bytes.min(END - PAGE) / PAGE * PAGE;
        Iova { gaps: BTreeMap::from([(PAGE, len)]) }
    }

    /// The top of the highest gap that is long enough. `bytes` are whole pages.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u32> {
        let (&start, &len) = self.gaps.iter().rev().find(|(_, len)| **len >= bytes)?;
        if len == bytes {
            self.gaps.remove(&start);
        } else {
            self.gaps.insert(start, len - bytes);
        }
        u32::try_from(start + len - bytes).ok()
    }

    /// Gives back what [`Iova::take`] gave, joining it with the gaps beside it.
    pub(super) fn give(&mut self, start: u32, bytes: u64) {
        let (mut start, mut len) = (u64::from(start), bytes);
        if let Some(after) = self.gaps.remove(&(start + len)) {
            len += after;
        }
        if let Some((&before, &gap)) = self.gaps.range(..start).next_back()
            && before + gap == start
        {
            (start, len) = (before, len + gap);
        }
        self.gaps.insert(start, len);
    }

    /// Start and length of every gap, ascending.
    #[cfg(test)]
    fn gaps(&self) -> Vec<(u64, u64)> {
        self.gaps.iter().map(|(start, len)| (*start, *len)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_from_the_top_and_holes_are_joined() {
        let mut iova = Iova::new(END - PAGE);
        assert_eq!(iova.take(PAGE), Some(0xffff_f000));
        assert_eq!(iova.take(3 * PAGE), Some(0xffff_c000));
        assert_eq!(iova.take(PAGE), Some(0xffff_b000));
        iova.give(0xffff_c000, 3 * PAGE);
        assert_eq!(iova.take(2 * PAGE), Some(0xffff_d000), "the highest gap that fits");
        assert_eq!(iova.take(2 * PAGE), Some(0xffff_9000), "too long for what is left of it");
        for (start, pages) in [(0xffff_b000, 1), (0xffff_f000, 1), (0xffff_9000, 2), (0xffff_d000, 2)] {
            iova.give(start, pages * PAGE);
        }
        assert_eq!(iova.gaps(), [(PAGE, END - PAGE)], "nothing is lost");
    }

    #[test]
    fn fragments_do_not_add_up() {
        let mut iova = Iova::new(4 * PAGE);
        let pages: Vec<_> = (0..4).map(|_| iova.take(PAGE).unwrap()).collect();
        assert_eq!(iova.take(PAGE), None);
        iova.give(pages[0], PAGE);
        iova.give(pages[2], PAGE);
        assert_eq!(iova.take(2 * PAGE), None, "two pages are free, but apart");
        iova.give(pages[1], PAGE);
        assert_eq!(iova.take(3 * PAGE), Some(pages[2]));
    }
}
