//! Device-management MADs over UDP: an initiator finds targets of an address that it knows.

mod mini;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use mini::{Mini, login_req, real};
use riser_memory::{MemSlice, Memory};
use riser_scsi::srp::{PortIdParts, TargetPortId};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{
    Access, AhAttr, CqId, Gid, Mr, PdId, Provider, QKey, QpAttr, QpCap, QpId, QpInitAttr, QpState,
    QpType, RecvWr, SendOp, SendWr, Sge, UdDest, Verbs, WrId,
};
use riser_transport::wire::dm::{
    Attribute, ClassPortInfo, DmHeader, IoUnitInfo, IocProfile, Method, ServiceEntry, Status,
};

/// Queue pair 1 of an initiator's device.
struct Gsi {
    dev: Roce,
    pd: PdId,
    cq: CqId,
    qp: QpId,
    memory: MemSlice,
    mr: Mr,
}

impl Gsi {
    fn open(addr: IpAddr) -> Self {
        let mut dev = Roce::open(&RoceConfig::new(addr)).unwrap();
        let pd = dev.alloc_pd().unwrap();
        let memory = Memory::new(4096).unwrap().whole();
        let mr = dev.reg_mr(pd, &memory, Access::LOCAL_WRITE).unwrap();
        let cq = dev.create_cq(16).unwrap();
        let qp = dev
            .create_qp(&QpInitAttr {
                pd,
                send_cq: cq,
                recv_cq: cq,
                srq: None,
                qp_type: QpType::Gsi,
                cap: QpCap {
                    max_send_wr: 4,
                    max_recv_wr: 4,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline: 0,
                },
                sq_sig_all: false,
            })
            .unwrap();
        let state = |state| QpAttr {
            state: Some(state),
            ..QpAttr::default()
        };
        let init = QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            qkey: Some(QKey::GSI),
            ..state(QpState::Init)
        };
        dev.modify_qp(qp, &init).unwrap();
        dev.modify_qp(qp, &state(QpState::Rtr)).unwrap();
        let rts = QpAttr {
            sq_psn: Some(0),
            ..state(QpState::Rts)
        };
        dev.modify_qp(qp, &rts).unwrap();
        Self {
            dev,
            pd,
            cq,
            qp,
            memory,
            mr,
        }
    }

    fn sge(&self, at: u64, length: u32) -> [Sge; 1] {
        [Sge {
            addr: self.memory.addr() + at,
            length,
            lkey: self.mr.lkey,
        }]
    }

    /// Asks for an attribute, again after a while as one does with datagrams.
    fn ask(&mut self, server: IpAddr, method: Method, attribute: Attribute) -> (Status, Vec<u8>) {
        let header = DmHeader {
            method,
            status: Status::Success,
            transaction: 0x1234,
            attribute,
        };
        self.memory.write(0, &header.emit(&[]));
        for _ in 0..5 {
            self.post(server);
            let until = Instant::now() + Duration::from_secs(1);
            while Instant::now() < until {
                real(&mut self.dev);
                let mut done = Vec::new();
                self.dev.poll_cq(self.cq, 4, &mut done).unwrap();
                if done.iter().any(|c| c.opcode.is_recv()) {
                    let mut mad = vec![0; 256];
                    self.memory.read(1024 + 40, &mut mad);
                    let (answer, data) = DmHeader::parse(&mad).unwrap();
                    assert_eq!(answer.method, Method::GetResp);
                    assert_eq!(answer.transaction, 0x1234);
                    assert_eq!(answer.attribute, attribute);
                    return (answer.status, data.to_vec());
                }
            }
        }
        panic!("no answer");
    }

    fn post(&mut self, server: IpAddr) {
        let recv = RecvWr {
            wr_id: WrId(1),
            sges: &self.sge(1024, 296),
        };
        self.dev.post_recv(self.qp, &[recv]).unwrap();
        let ah = AhAttr {
            dgid: Gid::from(server),
            sgid_index: 0,
            hop_limit: 64,
            traffic_class: 0,
            port: 1,
        };
        let ah = self.dev.create_ah(self.pd, ah).unwrap();
        let sge = self.sge(0, 256);
        let send = SendWr {
            ud: Some(UdDest {
                ah,
                qpn: 1,
                qkey: QKey::GSI,
            }),
            ..SendWr::new(2, SendOp::Send, &sge)
        };
        self.dev.post_send(self.qp, &[send]).unwrap();
        self.dev.progress(Instant::now());
        self.dev.destroy_ah(ah).unwrap();
    }
}

#[test]
fn an_address_is_enough_to_find_and_use_its_targets() {
    let addr = |host| IpAddr::V4(Ipv4Addr::new(127, 79, 1, host));
    let text = "backends: { d: { kind: ram, size: 1MiB } }\n\
         targets:\n\
         - { name: one, portals: [{ protocol: srp, listen: 127.79.1.1, ioc_guid: 0x1122334455667788, id_ext: \"0x0000000000000abc\" }], luns: { 0: { backend: d } }, access: open }\n\
         - { name: two, portals: [{ protocol: srp, listen: \"127.79.1.1:5556\" }], luns: { 0: { backend: d } }, access: open }\n\
         workers: { count: 2 }\n";
    let config = Config::parse(text, "test.yaml").unwrap_or_else(|e| panic!("{e}"));
    let server = Server::start(&config).unwrap();
    let mut gsi = Gsi::open(addr(2));
    let mut get = |attribute| gsi.ask(addr(1), Method::Get, attribute);

    let (status, data) = get(Attribute::ClassPortInfo);
    assert_eq!(status, Status::Success);
    assert!(ClassPortInfo::parse(&data).is_some());
    let (_, data) = get(Attribute::IoUnitInfo);
    let unit = IoUnitInfo::parse(&data).unwrap();
    assert_eq!(unit.controllers().collect::<Vec<_>>(), [1, 2]);
    let (_, data) = get(Attribute::IocProfile { slot: 1 });
    let profile = IocProfile::parse(&data).unwrap();
    assert_eq!(
        (profile.guid, profile.name.as_str()),
        (0x1122_3344_5566_7788, "one")
    );
    let services = Attribute::ServiceEntries {
        slot: 1,
        first: 0,
        last: profile.services - 1,
    };
    let (_, data) = get(services);
    let entries = ServiceEntry::parse_list(&data, usize::from(profile.services));
    assert_eq!(entries[0].srp_extension(), Some(0xabc));
    assert_eq!(entries[0].service_id, 0x0106_0000 | 5555);

    for (attribute, expected) in [
        (Attribute::IocProfile { slot: 3 }, Status::NoController),
        (Attribute::IocProfile { slot: 0 }, Status::InvalidField),
        (Attribute::IocProfile { slot: 17 }, Status::InvalidField),
        (
            Attribute::ServiceEntries {
                slot: 1,
                first: 3,
                last: 2,
            },
            Status::InvalidField,
        ),
        (
            Attribute::ServiceEntries {
                slot: 1,
                first: 0,
                last: 255,
            },
            Status::InvalidField,
        ),
        (
            Attribute::Other {
                id: 0x20,
                modifier: 0,
            },
            Status::UnsupportedAttribute,
        ),
    ] {
        assert_eq!(get(attribute).0, expected, "{attribute:?}");
    }
    let set = gsi.ask(addr(1), Method::Other(2), Attribute::IoUnitInfo);
    assert_eq!(set.0, Status::UnsupportedMethod);

    // What was found is enough to log in, on the same device.
    let target = TargetPortId::from_parts(PortIdParts {
        extension: 0xabc,
        guid: profile.guid,
    });
    let port = entries[0].service_id as u16;
    let req = login_req(2, target);
    let mini = Mini::connect(gsi.dev, SocketAddr::new(addr(1), port), &req, &mut real);
    let mini = mini.map_err(|(_, e)| e).unwrap();
    mini.disconnect(&mut real);
    server.shutdown().unwrap();
}
