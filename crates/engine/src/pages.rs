//! Which K/V pages are free, held by slots, or held by the prefix cache.
//!
//! A page is written only by the slot that took it from here, and only at places behind every cached
//! position, so that holders of a shared page see contents that do not change. A running sequence has
//! *reserved* the pages of its worst case; the pool keeps `free + cached_only >= reserved`, so a reserved
//! page can always be had, if need be by evicting from the cache.

/// Reference counts of all pages.
#[derive(Debug)]
pub(crate) struct PagePool {
    free: Vec<u32>,
    slots: Vec<u32>,
    cached: Vec<u32>,
    cached_only: usize,
    cached_pages: usize,
    reserved: usize,
}

impl PagePool {
    pub(crate) fn new(pages: usize) -> Self {
        Self {
            free: (0..pages as u32).rev().collect(),
            slots: vec![0; pages],
            cached: vec![0; pages],
            cached_only: 0,
            cached_pages: 0,
            reserved: 0,
        }
    }

    /// Pages that could be promised to someone now.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.cached_only - self.reserved
    }

    /// Pages on the free list.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Pages that the cache holds, shared ones counted once.
    pub(crate) fn cached_pages(&self) -> usize {
        self.cached_pages
    }

    /// Of `pages`, those that only the cache holds: holding them takes them out of [`Self::available`].
    pub(crate) fn cached_only_among(&self, pages: &[u32]) -> usize {
        pages.iter().filter(|&&page| self.slots[page as usize] == 0).count()
    }

    /// Promises `pages` pages.
    pub(crate) fn reserve(&mut self, pages: usize) {
        assert!(pages <= self.available(), "{pages} pages reserved of {}", self.available());
        self.reserved += pages;
    }

    /// Takes back a promise.
    pub(crate) fn unreserve(&mut self, pages: usize) {
        assert!(pages <= self.reserved, "{pages} pages given back of {} reserved", self.reserved);
        self.reserved -= pages;
    }

    /// A promised page, now held by a slot. `None`: evict from the cache and ask again.
    pub(crate) fn take_reserved(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.unreserve(1);
        self.slots[page as usize] = 1;
        Some(page)
    }

    /// A page for the cache itself, not promised to anyone. `None` as above.
    pub(crate) fn take_cached(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.cached[page as usize] = 1;
        self.cached_only += 1;
        self.cached_pages += 1;
        Some(page)
    }

    /// A slot shares a page that someone holds.
    pub(crate) fn hold_slot(&mut self, page: u32) {
        let at = page as usize;
        assert!(self.slots[at] + self.cached[at] > 0, "page {page} is free and cannot be shared");
        self.cached_only -= usize::from(self.slots[at] == 0);
        self.slots[at] += 1;
    }

    /// A slot lets go of a page.
    pub(crate) fn release_slot(&mut self, page: u32) {
        let at = page as usize;
        assert!(self.slots[at] > 0, "page {page} is not held by a slot");
        self.slots[at] -= 1;
        if self.slots[at] == 0 {
            match self.cached[at] {
                0 => self.free.push(page),
                _ => self.cached_only += 1,
            }
        }
    }

    /// The cache holds a page that someone holds.
    pub(crate) fn hold_cached(&mut self, page: u32) {
        let at = page as usize;
        assert!(self.slots[at] + self.cached[at] > 0, "page {page} is free and cannot be cached");
        self.cached_pages += usize::from(self.cached[at] == 0);
        self.cached[at] += 1;
    }

    /// The cache lets go of a page.
    pub(crate) fn release_cached(&mut self, page: u32) {
        let at = page as usize;
        assert!(self.cached[at] > 0, "page {page} is not cached");
        self.cached[at] -= 1;
        if self.cached[at] == 0 {
            self.cached_pages -= 1;
            if self.slots[at] == 0 {
                self.cached_only -= 1;
                self.free.push(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_page_can_always_be_had() {
        let mut pool = PagePool::new(3);
        pool.reserve(2);
        let first = pool.take_reserved().expect("free");
        pool.hold_cached(first);
        pool.release_slot(first);
        assert_eq!((pool.available(), pool.cached_pages()), (2, 1));
        pool.reserve(2);
        assert_eq!(pool.available(), 0);
        pool.take_reserved().expect("free");
        pool.take_reserved().expect("free");
        assert_eq!(pool.take_reserved(), None, "only the cached page is left");
        pool.release_cached(first);
        assert_eq!(pool.take_reserved(), Some(first));
    }

    #[test]
    fn shared_pages_are_freed_by_the_last_holder() {
        let mut pool = PagePool::new(1);
        pool.reserve(1);
        let page = pool.take_reserved().expect("free");
        pool.hold_slot(page);
        pool.hold_cached(page);
        pool.release_slot(page);
        assert_eq!(pool.cached_only_among(&[page]), 0);
        pool.release_slot(page);
        assert_eq!((pool.free(), pool.available(), pool.cached_only_among(&[page])), (0, 1, 1));
        pool.release_cached(page);
        assert_eq!((pool.free(), pool.available()), (1, 1));
    }

    #[test]
    #[should_panic(expected = "reserved of")]
    fn more_than_there_is_cannot_be_reserved() {
        PagePool::new(1).reserve(2);
    }
}
