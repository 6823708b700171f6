/*
 * SG_IO for hosts with DIX, included by sg.c. Such a host has separate lists for the blocks and for their protection
 * information, but SG_IO only has one buffer. We use the same buffer as with all other hosts, which contains 8 bytes of
 * protection information after each block, and convert it. The commands and the device are not changed.
 */
#include <linux/blk-integrity.h>
#include <linux/t10-pi.h>

#define TUPLE sizeof(struct t10_pi_tuple)
#define MOST_BLOCKS 256

/* Returns RDPROTECT, WRPROTECT, VRPROTECT or ORPROTECT of a command that has it. */
static u8 protect_field(const u8 *cdb)
{
	switch (cdb[0]) {
	case READ_10: case READ_12: case READ_16:
	case WRITE_10: case WRITE_12: case WRITE_16:
	case WRITE_VERIFY: case WRITE_VERIFY_12: case WRITE_VERIFY_16:
	case VERIFY: case VERIFY_12: case VERIFY_16:
	case WRITE_SAME: case WRITE_SAME_16:
	case COMPARE_AND_WRITE: case 0x8b /* ORWRITE */:
		return cdb[1] >> 5;
	case VARIABLE_LENGTH_CMD:
		return cdb[10] >> 5;
	default:
		return 0;
	}
}

/* Copies blocks and their protection information between the buffer of the user and both lists. */
static int convert(void __user *user, u8 *blocks, u8 *tuples, u32 size, u32 count, bool out)
{
	u32 i;

	for (i = 0; i < count; i++, user += size + TUPLE, blocks += size, tuples += TUPLE) {
		if (out && (copy_from_user(blocks, user, size) || copy_from_user(tuples, user + size, TUPLE)))
			return -EFAULT;
		if (!out && (copy_to_user(user, blocks, size) || copy_to_user(user + size, tuples, TUPLE)))
			return -EFAULT;
	}
	return 0;
}

static int attach_tuples(struct request *rq, u8 *tuples, u32 len)
{
	struct bio_integrity_payload *bip = bio_integrity_alloc(rq->bio, GFP_KERNEL, 1);

	if (IS_ERR(bip))
		return PTR_ERR(bip);
	bvec_set_page(bip->bip_vec, virt_to_page(tuples), len, offset_in_page(tuples));
	bip->bip_vcnt = 1;
	bip->bip_iter.bi_size = len;
	rq->nr_integrity_segments = 1;
	rq->cmd_flags |= REQ_INTEGRITY;
	return 0;
}

static int report_result(struct scsi_cmnd *cmd, struct sg_io_hdr *header, u32 size)
{
	struct scsi_sense_hdr sense;

	header->status = cmd->result & 0xfe;
	header->masked_status = header->status >> 1;
	header->host_status = host_byte(cmd->result);
	header->msg_status = 0;
	header->driver_status = 0;
	header->sb_len_wr = 0;
	header->resid = cmd->resid_len / size * (size + TUPLE);
	header->info = header->status || header->host_status ? SG_INFO_CHECK : 0;
	if (!scsi_normalize_sense(cmd->sense_buffer, SCSI_SENSE_BUFFERSIZE, &sense) || !header->sbp)
		return 0;
	header->driver_status = DRIVER_SENSE;
	header->sb_len_wr = min_t(u32, header->mx_sb_len, 8 + cmd->sense_buffer[7]);
	return copy_to_user(header->sbp, cmd->sense_buffer, header->sb_len_wr) ? -EFAULT : 0;
}

/* Runs the request of a header, or returns -ENOIOCTLCMD if it has no protection information or the host no DIX. */
static int sg_io_protected(struct scsi_device *device, void __user *argument)
{
	u32 size = device->sector_size, count;
	struct sg_io_hdr header;
	struct scsi_cmnd *cmd;
	struct request *rq;
	u8 cdb[32], *blocks, *tuples;
	bool out;
	int ret;

	if (get_sg_io_hdr(&header, argument))
		return -EFAULT;
	if (!scsi_host_prot_dma(device->host) || header.iovec_count || header.cmd_len > sizeof(cdb))
		return -ENOIOCTLCMD;
	if (copy_from_user(cdb, header.cmdp, header.cmd_len))
		return -EFAULT;
	count = header.dxfer_len / (size + TUPLE);
	if (!protect_field(cdb) || !count || count > MOST_BLOCKS || header.dxfer_len % (size + TUPLE))
		return -ENOIOCTLCMD;
	out = header.dxfer_direction == SG_DXFER_TO_DEV;
	blocks = alloc_pages_exact(count * size, GFP_KERNEL | __GFP_ZERO);
	tuples = alloc_pages_exact(count * TUPLE, GFP_KERNEL | __GFP_ZERO);
	ret = -ENOMEM;
	if (!blocks || !tuples)
		goto free;
	ret = out ? convert(header.dxferp, blocks, tuples, size, count, true) : 0;
	if (ret)
		goto free;
	rq = scsi_alloc_request(device->request_queue, out ? REQ_OP_DRV_OUT : REQ_OP_DRV_IN, 0);
	ret = PTR_ERR_OR_ZERO(rq);
	if (ret)
		goto free;
	cmd = blk_mq_rq_to_pdu(rq);
	cmd->cmd_len = header.cmd_len;
	memcpy(cmd->cmnd, cdb, header.cmd_len);
	rq->timeout = 60 * HZ;
	ret = blk_rq_map_kern(rq->q, rq, blocks, count * size, GFP_KERNEL);
	if (!ret)
		ret = attach_tuples(rq, tuples, count * TUPLE);
	if (!ret) {
		blk_execute_rq(rq, false);
		ret = report_result(cmd, &header, size);
		if (!ret && !out)
			ret = convert(header.dxferp, blocks, tuples, size, count, false);
		if (!ret && put_sg_io_hdr(&header, argument))
			ret = -EFAULT;
	}
	blk_mq_free_request(rq);
free:
	if (blocks)
		free_pages_exact(blocks, count * size);
	if (tuples)
		free_pages_exact(tuples, count * TUPLE);
	return ret;
}
