//! Objects that programs hold pointers to.
//!
//! An [`Object`] is a structure of the C interface, whose address the program has, with what the
//! library keeps about it behind that. Its memory is never given back to the allocator: a destroyed
//! object's is used for the next one of its kind. So a pointer to a destroyed object can be looked at
//! and is refused, unless a newer object has taken its place: then it means that one.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::errno::Errno;
use crate::lock::shielded;

/// Kind of object.
pub(crate) trait Kind: Sized + Send + Sync + 'static {
    /// Structure of the C interface.
    type C: 'static;
    /// Structure that the program's pointers point to: `C`, or a member of it.
    type Handle: 'static;
    /// Offset of the handle in `C`, in bytes.
    const OFFSET: usize = 0;
    /// Word that marks a live object of this kind.
    const TAG: u32;

    /// Memory of destroyed objects of this kind.
    fn spares() -> &'static Spares<Self>;
}

/// Memory of destroyed objects.
pub(crate) struct Spares<K: Kind>(Mutex<Vec<Ref<K>>>);

impl<K: Kind> Spares<K> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

#[repr(C)]
struct Object<K: Kind> {
    c: UnsafeCell<K::C>,
    tag: AtomicU32,
    kind: UnsafeCell<MaybeUninit<K>>,
}

/// A live object.
pub(crate) struct Ref<K: Kind>(NonNull<Object<K>>);

impl<K: Kind> Clone for Ref<K> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<K: Kind> Copy for Ref<K> {}
impl<K: Kind> PartialEq for Ref<K> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

// SAFETY: the memory is never freed; what a `Kind` has may be shared between threads, and the
// structure of the C interface is used by raw pointers only.
unsafe impl<K: Kind> Send for Ref<K> {}
// SAFETY: as above.
unsafe impl<K: Kind> Sync for Ref<K> {}

impl<K: Kind> Ref<K> {
    /// Makes an object.
    pub(crate) fn new(c: K::C, kind: K) -> Self {
        let spare = shielded(&K::spares().0).pop();
        let Some(spare) = spare else {
            let object = Box::new(Object::<K> {
                c: UnsafeCell::new(c),
                tag: AtomicU32::new(K::TAG),
                kind: UnsafeCell::new(MaybeUninit::new(kind)),
            });
            return Self(NonNull::from(Box::leak(object)));
        };
        // SAFETY: the memory is never freed, and no other thread uses one that is not live.
        unsafe {
            let object = spare.0.as_ref();
            object.c.get().write(c);
            (*object.kind.get()).write(kind);
            object.tag.store(K::TAG, Ordering::Release);
        }
        spare
    }

    /// The object that a pointer of the program's names.
    ///
    /// # Errors
    /// `EINVAL` where it names none.
    ///
    /// # Safety
    /// The pointer is null, or one that this library has given out for an object of this kind.
    pub(crate) unsafe fn get(handle: *mut K::Handle) -> Result<Self, Errno> {
        if handle.is_null() {
            return Err(Errno::INVALID);
        }
        // SAFETY: the pointer was given out for such an object, whose memory is never freed.
        let object =
            unsafe { NonNull::new_unchecked(handle.byte_sub(K::OFFSET).cast::<Object<K>>()) };
        // SAFETY: as above.
        let tag = unsafe { &object.as_ref().tag };
        if tag.load(Ordering::Acquire) != K::TAG {
            return Err(Errno::INVALID);
        }
        Ok(Self(object))
    }

    /// The pointer that the program has.
    pub(crate) fn handle(self) -> *mut K::Handle {
        // SAFETY: the handle is a member of the structure, at this offset.
        unsafe { self.c().byte_add(K::OFFSET).cast() }
    }

    /// The structure of the C interface.
    pub(crate) fn c(self) -> *mut K::C {
        // SAFETY: the memory is never freed.
        unsafe { (*self.0.as_ptr()).c.get() }
    }

    /// What the library keeps about the object, for as long as it is alive.
    pub(crate) fn kind(self) -> &'static K {
        // SAFETY: the object was alive when the reference was made. A program that destroys it while
        // another of its threads uses it breaks the rules of the interface.
        unsafe { (*self.0.as_ref().kind.get()).assume_init_ref() }
    }

    /// Ends the object for the program, and leaves it to others that refer to it for ever.
    ///
    /// # Errors
    /// As [`Ref::retire`].
    pub(crate) fn bury(self) -> Result<(), Errno> {
        // SAFETY: the memory is never freed.
        let tag = unsafe { &self.0.as_ref().tag };
        tag.compare_exchange(K::TAG, 0, Ordering::AcqRel, Ordering::Relaxed)
            .map(drop)
            .map_err(|_| Errno::INVALID)
    }

    /// Ends the object and keeps its memory for the next one.
    ///
    /// # Errors
    /// `EINVAL` where another thread has ended it.
    pub(crate) fn retire(self) -> Result<(), Errno> {
        self.bury()?;
        // SAFETY: the memory is never freed.
        let object = unsafe { self.0.as_ref() };
        // SAFETY: it was alive until now, so it is initialised, and only one thread gets here.
        unsafe { (*object.kind.get()).assume_init_drop() };
        shielded(&K::spares().0).push(self);
        Ok(())
    }
}

impl<K: Kind> Deref for Ref<K> {
    type Target = K;

    fn deref(&self) -> &K {
        self.kind()
    }
}

/// Declares a kind of object.
macro_rules! kind {
    ($kind:ty, $c:ty, $tag:literal) => {
        $crate::object::kind!($kind, $c, $c, 0, $tag);
    };
    ($kind:ty, $c:ty, $handle:ty, $offset:expr, $tag:literal) => {
        impl $crate::object::Kind for $kind {
            type C = $c;
            type Handle = $handle;
            const OFFSET: usize = $offset;
            const TAG: u32 = u32::from_le_bytes(*$tag);

            fn spares() -> &'static $crate::object::Spares<Self> {
                static SPARES: $crate::object::Spares<$kind> = $crate::object::Spares::new();
                &SPARES
            }
        }
    };
}
pub(crate) use kind;
