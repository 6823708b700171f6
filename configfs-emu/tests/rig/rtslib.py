"""Everything that rtslib can do with backstores, iSCSI and SRP, through its own classes."""

import json
import os

from rtslib_fb import (FabricModule, FileIOStorageObject, LUN, MappedLUN, NetworkPortal, NodeACL,
                       RDMCPStorageObject, RTSRoot, Target, TPG)
from rtslib_fb.alua import ALUATargetPortGroup

directory = os.environ["FOLDER"]
image = os.path.join(directory, "disk.img")
with open(image, "wb") as f:
    f.truncate(16 << 20)

root = RTSRoot()
assert root.dbroot == "/etc/rtslib-fb-target", root.dbroot

disk = FileIOStorageObject("disk", dev=image, size=16 << 20, write_back=True, aio=True)
assert disk.is_configured() and disk.status == "deactivated", disk.status
assert disk.size == 16 << 20 and disk.udev_path == image and disk.write_back and disk.aio
assert disk.version and disk.wwn
disk.wwn = "5a0e1b2c-0000-4000-8000-0123456789ab"
disk.set_attribute("emulate_model_alias", 1)
disk.set_attribute("emulate_tpu", 1)
ram = RDMCPStorageObject("ram", size=8 << 20)
null = RDMCPStorageObject("null", size=1 << 30, nullio=True)
assert ram.size == 8 << 20 and not ram.nullio and null.nullio
assert sorted(so.name for so in root.storage_objects) == ["disk", "null", "ram"]

group = ALUATargetPortGroup(disk, "ap1", 2)
group.preferred = 1
group.alua_access_state = 1
assert group.tg_pt_gp_id == 2 and group.alua_access_status == 2, group.alua_access_status
assert ALUATargetPortGroup(disk, "default_tg_pt_gp").alua_access_type == 3

iscsi = FabricModule("iscsi")
assert list(iscsi.targets) == []
iqn = "iqn.2003-01.org.linux-iscsi.host.x8664:sn.0123456789ab"
target = Target(iscsi, iqn, mode="create")
tpg = TPG(target, 1, mode="create")
tpg.set_attribute("authentication", 0)
assert tpg.get_parameter("AuthMethod") == "CHAP,None"
tpg.set_parameter("MaxBurstLength", 1048576)
portal = NetworkPortal(tpg, "127.0.0.1", 3260)
portal.iser = True
assert portal.iser and not portal.offload
NetworkPortal(tpg, "[::1]", 3261)
lun0 = LUN(tpg, 0, disk)
lun7 = LUN(tpg, 7, ram, alias="the_ram")
assert lun7.alias == "the_ram" and lun7.storage_object == ram
assert lun0.alua_tg_pt_gp_name == "default_tg_pt_gp"
lun0.alua_tg_pt_gp_name = "ap1"
assert lun0.alua_tg_pt_gp_name == "ap1"
assert [m["lun"] for m in group.members] == [0], group.members
assert disk.status == "activated"
assert [lun.lun for lun in disk.attached_luns] == [0]

acl = NodeACL(tpg, "iqn.2024-01.com.example:client")
assert acl.tcq_depth == "64" and acl.session is None and acl.tag is None
acl.tag = "clients"
acl.tcq_depth = 16
acl.chap_userid = "client"
acl.chap_password = "a secret of some length"
acl.chap_mutual_userid = "target"
acl.chap_mutual_password = "another of some length"
assert acl.authenticate_target
acl.set_attribute("authentication", 1)
MappedLUN(acl, 0, lun0)
mapped = MappedLUN(acl, 3, lun7, write_protect=True)
assert mapped.write_protect and mapped.tpg_lun.lun == 7
tpg.enable = True
assert tpg.enable

srpt = FabricModule("srpt")
port = Target(srpt, "ib.00000000000000000000ffff7f000001")
srp = TPG(port, 1)
srp_lun = LUN(srp, 0, null)
srp_acl = NodeACL(srp, "ib.00000000000000010002c90300a1b2c3")
MappedLUN(srp_acl, 0, srp_lun)
srp.enable = True

iscsi.discovery_userid = "finder"
iscsi.discovery_password = "a secret for finding"
iscsi.discovery_enable_auth = True

saved = os.path.join(directory, "saved.json")
root.save_to_file(saved)
before = root.dump()
with open(os.path.join(directory, "dump.json"), "w") as f:
    json.dump(before, f)

root.clear_existing(confirm=True)
root.invalidate_caches()
assert list(root.targets) == [] and list(root.storage_objects) == []
errors = root.restore_from_file(saved)
assert errors == [], errors
after = root.dump()


def ordered(value):
    if isinstance(value, dict):
        return {k: ordered(v) for k, v in value.items()}
    if isinstance(value, list):
        return sorted((ordered(v) for v in value), key=lambda v: json.dumps(v, sort_keys=True))
    return value


assert ordered(after) == ordered(before), json.dumps([before, after], sort_keys=True, indent=1)
