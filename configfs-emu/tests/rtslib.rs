//! Tests the emulated tree using Debian's `rtslib-fb` and `targetcli`, and a shell script.

mod rig;

use rig::{Rig, parse, script};
use riser_configfs_emu::host::OtherHost;
use riser_configfs_emu::saved;
use serde_json::{Value, json};

/// Returns all values that were ever served.
fn ever(rig: &Rig, key: &str) -> Vec<Value> {
    let given = rig.given.lock().unwrap();
    given.iter().map(|d| d[key].clone()).collect()
}

#[test]
fn rtslib_configures_saves_and_restores() {
    let Some(rig) = Rig::new("configfs_rtslib") else {
        return;
    };
    rig.must(&format!(
        "/usr/bin/python3 {}",
        script("rtslib.py").display()
    ));
    let given = rig.last();
    let config = parse(&given).unwrap();
    assert_eq!(config.backends.len(), 3);
    let disk = &given["backends"]["fileio_0:disk"];
    assert_eq!(disk["serial"], "5a0e1b2c-0000-4000-8000-0123456789ab");
    assert_eq!(disk["naa"], "60014055a0e1b2c00004000800001234");
    assert_eq!(
        (&disk["product"], &disk["write_cache"]),
        (&json!("disk"), &json!("on"))
    );
    assert_eq!(
        given["targets"][0],
        json!({
            "name": "iqn.2003-01.org.linux-iscsi.host.x8664:sn.0123456789ab",
            "iqn": "iqn.2003-01.org.linux-iscsi.host.x8664:sn.0123456789ab",
            "portals": [
                { "protocol": "iscsi", "listen": "127.0.0.1:3260" },
                { "protocol": "iser", "listen": "127.0.0.1:3260" },
                { "protocol": "iscsi", "listen": "[::1]:3261" },
            ],
            "luns": { "0": "fileio_0:disk", "7": { "backend": "rd_mcp_1:ram", "read_only": true } },
            "access": [{
                "iqn": "iqn.2024-01.com.example:client",
                "luns": { "0": "fileio_0:disk", "3": { "backend": "rd_mcp_1:ram", "read_only": true } },
            }],
            "chap": {
                "users": [{ "name": "client", "secret": "a secret of some length" }],
                "mutual": { "name": "target", "secret": "another of some length" },
            },
        })
    );
    assert_eq!(
        given["targets"][1]["portals"][0]["listen"],
        "127.0.0.1:5555"
    );
    assert_eq!(given["discovery_chap"]["users"][0]["name"], "finder");
}

#[test]
fn targetcli_configures_saves_and_restores() {
    let Some(rig) = Rig::new("configfs_targetcli") else {
        return;
    };
    let tpg = "/iscsi/iqn.2026-01.com.example:t/tpg1";
    let said = rig.must(&format!(
        "targetcli /backstores/fileio create name=img file_or_dev=$FOLDER/img size=8M
         targetcli /iscsi create iqn.2026-01.com.example:t
         targetcli {tpg}/luns create /backstores/fileio/img
         targetcli {tpg}/acls create iqn.2026-01.com.example:i
         targetcli {tpg}/acls/iqn.2026-01.com.example:i set auth userid=joe \
             password=a-long-enough-secret
         targetcli {tpg} set attribute authentication=1
         targetcli {tpg}/portals delete 0.0.0.0 3260
         targetcli {tpg}/portals create 127.0.0.1 3260
         targetcli {tpg}/portals/127.0.0.1:3260 enable_iser boolean=true
         targetcli saveconfig
         targetcli ls
         targetcli clearconfig confirm=True
         targetcli restoreconfig
         targetcli ls"
    ));
    assert!(said.contains("[fileio/img ("), "{said}");
    assert!(said.contains("[1-way auth, Mapped LUNs: 1]"), "{said}");
    let target = rig.last()["targets"][0].clone();
    assert_eq!(
        target["access"],
        json!([{ "iqn": "iqn.2026-01.com.example:i" }])
    );
    assert_eq!(target["chap"]["users"][0]["name"], "joe");
    assert_eq!(
        target["portals"][1],
        json!({ "protocol": "iser", "listen": "127.0.0.1:3260" })
    );
    assert!(ever(&rig, "targets").contains(&json!([])), "it was cleared");
    rig.must("targetcli /backstores/fileio delete img\ntargetcli clearconfig confirm=True");
    assert_eq!(rig.last(), json!({ "backends": {}, "targets": [] }));
}

/// The first target in this file is only partially supported by `riserd`, and there is another
/// target after it.
#[test]
fn targetctl_restore_matches_import() {
    let Some(rig) = Rig::new("configfs_restore") else {
        return;
    };
    for (name, count) in [("short-secrets", 2), ("groups", 2)] {
        let file = rig.directory.join(format!("{name}.json"));
        let shape = format!("{}/tests/data/lio/{name}.json", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(shape).unwrap();
        let text = text.replace("/srv/riser-corpus", rig.directory.to_str().unwrap());
        std::fs::write(&file, &text).unwrap();
        rig.must(&format!("targetctl restore {}", file.display()));
        let world = OtherHost::default();
        let restored = saved::restore(&serde_json::from_str(&text).unwrap(), &world);
        let imported = saved::configuration(restored, "a secret of no one else", &world).config;
        let served = rig.last();
        assert_eq!(served["targets"].as_array().unwrap().len(), count, "{name}");
        let served = parse(&served).unwrap();
        assert!(riser_config::diff(&imported, &served).is_empty(), "{name}");
        rig.must("targetctl clear");
    }
}

/// The Pacemaker agents use this order: the attributes of a disk are written after its LUN was
/// created.
#[test]
fn attributes_are_writable_after_lun_creation() {
    let Some(rig) = Rig::new("configfs_agent") else {
        return;
    };
    let iqn = "iqn.2026-01.com.example:agent";
    let core = "/sys/kernel/config/target/core/fileio_0/unit";
    rig.must(&format!(
        "targetcli /iscsi set global auto_add_default_portal=false
         targetcli /iscsi create {iqn}
         targetcli /iscsi/{iqn}/tpg1/portals create 127.0.0.1 3260
         targetcli /iscsi/{iqn}/tpg1 set attribute authentication=0 generate_node_acls=1
         targetcli /backstores/fileio create name=unit file_or_dev=$FOLDER/unit size=8M
         echo 0badcafe > {core}/wwn/vpd_unit_serial
         targetcli /iscsi/{iqn}/tpg1/luns create /backstores/fileio/unit 1
         for attribute in emulate_tpu emulate_3pc emulate_caw; do echo 1 > {core}/attrib/$attribute; done
         test $(cat {core}/attrib/emulate_tpu) = 1"
    ));
    let last = rig.last();
    assert_eq!(last["targets"][0]["luns"]["1"]["backend"], "fileio_0:unit");
    assert_eq!(last["backends"]["fileio_0:unit"].get("thin"), None);
    rig.must(&format!(
        "targetcli /iscsi/{iqn}/tpg1/luns delete 1
         targetcli /backstores/fileio delete unit
         targetcli /iscsi delete {iqn}"
    ));
}

#[test]
fn shell_script_configures_srp() {
    let Some(rig) = Rig::new("configfs_script") else {
        return;
    };
    rig.must(&format!("bash {}", script("blktests.sh").display()));
    assert!(rig.directory.join("served").exists());
    let targets = ever(&rig, "targets");
    let served = targets.iter().find(|t| **t != json!([])).unwrap();
    assert_eq!(
        served[0],
        json!({
            "name": "0x00000000000000000000ffff7f000001",
            "portals": [{ "protocol": "srp", "listen": "127.0.0.1:5555" }],
            "luns": { "0": "fileio_0:vdev0", "1": "fileio_1:vdev1" },
            "access": [
                { "initiator": "0002c90300a1b2c3" },
                { "address": "10.0.0.2" },
                { "address": "fe80::5054:ff:fe12:3456" },
            ],
        })
    );
    assert_eq!(rig.last(), json!({ "backends": {}, "targets": [] }));
}
