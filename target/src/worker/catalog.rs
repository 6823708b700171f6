//! Follows what is served: attaches backends, opens and closes portals, hands sessions their new
//! units, lets backends go.

use std::sync::{Arc, Weak};

use super::Worker;
use crate::backend::StoreId;
use crate::fabric::Unit;

/// A backend that is served no more. It stays attached while commands or sessions hold its units.
#[derive(Debug)]
pub(super) struct Leaving {
    place: usize,
    store: StoreId,
    units: Vec<Weak<Unit>>,
}

impl Worker {
    /// Takes over the registry's catalog, if it is another one than the worker's.
    pub(super) fn follow_catalog(&mut self) {
        let new = self.shared.registry.catalog();
        if Arc::ptr_eq(&new, &self.catalog) {
            return;
        }
        let old = std::mem::replace(&mut self.catalog, Arc::clone(&new));
        self.stores.resize(new.stores.len(), None);
        for (place, store) in new.stores.iter().enumerate() {
            match (store, self.stores[place]) {
                (Some(store), None) => {
                    let store = Arc::clone(store);
                    self.stores[place] = Some(self.driver.attach(&mut self.ring, store));
                }
                (None, Some(store)) if !self.leaving.iter().any(|l| l.place == place) => {
                    self.leaving.push(Leaving {
                        place,
                        store,
                        units: old.units_on(place).map(Arc::downgrade).collect(),
                    });
                }
                _ => {}
            }
        }
        self.follow_portals();
        self.follow_sessions();
    }

    /// Detaches backends that are served no more and that no task needs.
    pub(super) fn poll_leaving(&mut self) {
        let (driver, stores) = (&mut self.driver, &mut self.stores);
        self.leaving.retain(|leaving| {
            let idle = leaving.units.iter().all(|u| u.strong_count() == 0);
            let gone = idle && driver.detach(leaving.store);
            if gone {
                stores[leaving.place] = None;
            }
            !gone
        });
    }
}
