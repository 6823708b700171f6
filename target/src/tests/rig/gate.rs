//! Login decisions of a target with a single session.

use std::sync::Arc;

use riser_scsi::iscsi::keys::Offer;
use riser_scsi::iscsi::login::{Auth, CompletedLogin, Identity, LoginFault, Refusal, Terms};
use riser_scsi::iscsi::name::{DiscoveredTarget, IscsiName, TargetAddress};
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::iscsi::{Cid, CmdSn, Tsih};
use riser_scsi::lun::LunId;
use riser_scsi::nexus::{Nexus, NexusId, PortName, TargetPort};

use crate::fabric::{LunMap, Mapping};
use crate::iscsi::{Ending, Gate, LoginGrant, Window};
use crate::stats::SessionEvent;

pub(crate) struct FakeGate {
    /// Units, in the order of their LUNs.
    pub(crate) mappings: Vec<Mapping>,
    /// Nexus of the next session.
    pub(crate) nexus: NexusId,
    /// Number of commands of the next session.
    pub(crate) commands: u16,
    /// Failed logins.
    pub(crate) refused: Vec<LoginStatus>,
    /// Events counted by the target.
    pub(crate) events: Vec<SessionEvent>,
    pub(crate) offer: Offer,
    pub(crate) targets: usize,
    pub(crate) joined: usize,
    /// Set if a login replaces another session.
    pub(crate) waits: bool,
    /// Session to join on login, if set.
    pub(crate) window: Option<Arc<Window>>,
    /// Connections of the session that can be detached.
    pub(crate) others: Vec<Cid>,
}

impl FakeGate {
    pub(super) fn new(mappings: Vec<Mapping>) -> Self {
        Self {
            mappings,
            nexus: NexusId(7),
            commands: 0,
            refused: Vec::new(),
            events: Vec::new(),
            offer: Offer::default(),
            targets: 1,
            joined: 0,
            waits: false,
            window: None,
            others: Vec::new(),
        }
    }

    /// Returns a map of all units.
    pub(crate) fn luns(&self, read_only: bool) -> LunMap {
        let entry = |(lun, mapping): (u32, &Mapping)| {
            let mapping = Mapping {
                read_only,
                ..mapping.clone()
            };
            (LunId::new(lun).unwrap(), mapping)
        };
        LunMap::new((0..).zip(&self.mappings).map(entry))
    }

    /// Adds a nexus to units that do not have it yet.
    pub(crate) fn add_nexus(&self, id: NexusId, initiator: &PortName, target: &PortName) {
        for mapping in &self.mappings {
            if mapping.unit.lu.nexus(id).is_none() {
                let target = TargetPort {
                    name: target.clone(),
                    relative_id: 1,
                    group: 0,
                };
                let initiator = initiator.clone();
                mapping.unit.lu.add_nexus(id, Nexus { initiator, target });
            }
        }
    }
}

impl Gate for FakeGate {
    fn admit(&mut self, _: &Identity) -> Result<Terms, Refusal> {
        Ok(Terms {
            offer: self.offer,
            auth: Auth::None,
            portal_group: 1,
        })
    }

    fn join(&mut self, joined: &CompletedLogin, first: CmdSn) -> Result<LoginGrant, LoginStatus> {
        self.joined += 1;
        let initiator = format!("iqn.2026-01.a:i,i,0x{:012x}", self.nexus.0 ^ 7);
        let target = PortName::Iscsi("iqn.2026-01.a:t0,t,0x0001".into());
        self.add_nexus(self.nexus, &PortName::Iscsi(initiator), &target);
        let session = (self.nexus, Arc::new(self.luns(false)));
        let commands = self.commands;
        Ok(LoginGrant {
            tsih: Tsih(1),
            nexus: (!joined.session.discovery).then_some(session),
            params: joined.session,
            window: self
                .window
                .get_or_insert_with(|| Arc::new(Window::of(&joined.session, commands, first)))
                .clone(),
            waits: self.waits,
        })
    }

    fn refused(
        &mut self,
        status: LoginStatus,
        _: Option<&Identity>,
        _: Option<&LoginFault>,
        _: Option<&str>,
    ) {
        self.refused.push(status);
    }

    fn count(&mut self, event: SessionEvent) {
        self.events.push(event);
    }

    fn end_other(&mut self, cid: Cid, _: Ending) -> bool {
        self.others.contains(&cid)
    }

    fn stop_waiting(&mut self) {
        self.waits = false;
    }

    fn random(&mut self, out: &mut [u8]) {
        out.fill(4);
    }

    fn targets(&mut self, _: &IscsiName, wanted: Option<&IscsiName>) -> Vec<DiscoveredTarget> {
        (0..self.targets)
            .map(|i| DiscoveredTarget {
                name: IscsiName::new(&format!("iqn.2026-01.a:t{i}")).unwrap(),
                addresses: vec![TargetAddress::parse("10.0.0.1:3260,1").unwrap()],
            })
            .filter(|found| wanted.is_none_or(|name| found.name == *name))
            .collect()
    }
}
