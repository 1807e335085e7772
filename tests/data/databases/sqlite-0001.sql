BEGIN TRANSACTION;
CREATE TABLE agent (
    name VARCHAR(64) NOT NULL,
    secret_hash VARCHAR(64),
    boot_id VARCHAR(128),
    created FLOAT NOT NULL,
    last_seen FLOAT,
    CONSTRAINT pk_agent PRIMARY KEY (name)
);
INSERT INTO "agent" VALUES('local',NULL,'boot',10.0,20.0);
INSERT INTO "agent" VALUES('elsewhere','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',NULL,11.0,NULL);
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE artifact (
    sha256 VARCHAR(64) NOT NULL,
    size BIGINT NOT NULL,
    created FLOAT NOT NULL,
    last_used FLOAT NOT NULL,
    CONSTRAINT pk_artifact PRIMARY KEY (sha256)
);
INSERT INTO "artifact" VALUES('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',5,13.0,14.0);
CREATE TABLE artifact_pin (
    sha256 VARCHAR(64) NOT NULL,
    owner VARCHAR(128) NOT NULL,
    CONSTRAINT pk_artifact_pin PRIMARY KEY (sha256, owner),
    CONSTRAINT fk_artifact_pin_sha256 FOREIGN KEY(sha256) REFERENCES artifact (sha256)
);
INSERT INTO "artifact_pin" VALUES('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','study:1');
CREATE TABLE attempt (
    id INTEGER NOT NULL,
    kind VARCHAR(32) NOT NULL,
    message TEXT NOT NULL,
    at FLOAT NOT NULL,
    result_key VARCHAR(64),
    stage VARCHAR(16),
    study INTEGER,
    trial INTEGER,
    job VARCHAR(128),
    device VARCHAR(64),
    payload JSON,
    CONSTRAINT pk_attempt PRIMARY KEY (id),
    CONSTRAINT fk_attempt_study_trial FOREIGN KEY(study, trial) REFERENCES trial (study, number) ON DELETE CASCADE,
    CONSTRAINT fk_attempt_study FOREIGN KEY(study) REFERENCES study (id) ON DELETE CASCADE
);
INSERT INTO "attempt" VALUES(1,'infrastructure','cable fell out',19.0,'1111111111111111111111111111111111111111111111111111111111111111','measure',1,0,'1111111111111111111111111111111111111111111111111111111111111111.0','box',NULL);
CREATE TABLE calibration (
    device VARCHAR(64) NOT NULL,
    runtime VARCHAR(64) NOT NULL,
    build VARCHAR(128) NOT NULL,
    reference_ms FLOAT NOT NULL,
    samples JSON NOT NULL,
    created FLOAT NOT NULL,
    CONSTRAINT pk_calibration PRIMARY KEY (device, runtime, build),
    CONSTRAINT fk_calibration_device FOREIGN KEY(device) REFERENCES device (id) ON DELETE CASCADE
);
INSERT INTO "calibration" VALUES('box','fake','b1',10.0,'{"ms":[10.0]}',19.0);
CREATE TABLE device (
    id VARCHAR(64) NOT NULL,
    agent VARCHAR(64) NOT NULL,
    device JSON NOT NULL,
    state VARCHAR(16) NOT NULL,
    health VARCHAR(16) NOT NULL,
    health_reason TEXT,
    checked_at FLOAT NOT NULL,
    epoch INTEGER NOT NULL,
    lease_holder VARCHAR(64),
    lease_until FLOAT,
    last_seen FLOAT NOT NULL,
    CONSTRAINT pk_device PRIMARY KEY (id),
    CONSTRAINT fk_device_agent FOREIGN KEY(agent) REFERENCES agent (name)
);
INSERT INTO "device" VALUES('box','local','{"cores":2,"cpu":"cpu","id":"box","memory_mb":1024,"model":"Box","os":"Linux","target":"x86_64-linux","transport":"local"}','idle','good',NULL,19.0,4,NULL,NULL,20.0);
INSERT INTO "device" VALUES('phone','local','{"cores":2,"cpu":"cpu","id":"phone","memory_mb":1024,"model":"Box","os":"Linux","target":"x86_64-linux","transport":"local"}','idle','unknown',NULL,19.0,4,NULL,NULL,21.0);
INSERT INTO "device" VALUES('old','local','{"cores":2,"cpu":"cpu","id":"old","memory_mb":1024,"model":"Box","os":"Linux","target":"x86_64-linux","transport":"local"}','idle','bad',NULL,19.0,4,NULL,NULL,22.0);
CREATE TABLE enrol_token (
    token_hash VARCHAR(64) NOT NULL,
    expires FLOAT NOT NULL,
    CONSTRAINT pk_enrol_token PRIMARY KEY (token_hash)
);
INSERT INTO "enrol_token" VALUES('ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff',900.0);
CREATE TABLE event (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    study INTEGER NOT NULL,
    trial INTEGER,
    kind VARCHAR(16) NOT NULL,
    payload JSON NOT NULL,
    at FLOAT NOT NULL,
    CONSTRAINT fk_event_study_trial FOREIGN KEY(study, trial) REFERENCES trial (study, number) ON DELETE CASCADE,
    CONSTRAINT fk_event_study FOREIGN KEY(study) REFERENCES study (id) ON DELETE CASCADE
);
INSERT INTO "event" VALUES(1,1,0,'proposed','{}',16.0);
INSERT INTO "event" VALUES(2,1,0,'exported','{}',17.0);
INSERT INTO "event" VALUES(3,1,NULL,'study','{"state":"paused"}',18.0);
CREATE TABLE job (
    id VARCHAR(128) NOT NULL,
    result_key VARCHAR(64) NOT NULL,
    round INTEGER NOT NULL,
    kind VARCHAR(16) NOT NULL,
    study INTEGER,
    trial INTEGER,
    device VARCHAR(64) NOT NULL,
    priority INTEGER NOT NULL,
    payload JSON NOT NULL,
    state VARCHAR(16) NOT NULL,
    attempts INTEGER NOT NULL,
    epoch INTEGER,
    lease_until FLOAT,
    not_before FLOAT NOT NULL,
    created FLOAT NOT NULL,
    updated FLOAT NOT NULL,
    result JSON,
    blame VARCHAR(16),
    reason VARCHAR(32),
    message TEXT,
    CONSTRAINT pk_job PRIMARY KEY (id),
    CONSTRAINT fk_job_device FOREIGN KEY(device) REFERENCES device (id),
    CONSTRAINT fk_job_study_trial FOREIGN KEY(study, trial) REFERENCES trial (study, number) ON DELETE CASCADE,
    CONSTRAINT fk_job_study FOREIGN KEY(study) REFERENCES study (id) ON DELETE CASCADE,
    CONSTRAINT uq_job_result_key_round UNIQUE (result_key, round)
);
INSERT INTO "job" VALUES('1111111111111111111111111111111111111111111111111111111111111111.0','1111111111111111111111111111111111111111111111111111111111111111',0,'measure',1,0,'box',2,'{"candidate":{"affinity":[],"args":[],"deadline_s":1.0,"env":{},"inputs":{},"output_limit":1048576,"runner":{"build":"b1","files":{"run":{"sha256":"dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd","size":1}},"main":"run","patched":false,"runtime":"fake","target":"x86_64-linux"},"threads":1},"cool_down_s":0.0,"reference":null,"repetitions":1,"v":1}','queued',1,4,NULL,0.0,18.0,19.0,NULL,NULL,NULL,'cable fell out');
CREATE TABLE result (
    result_key VARCHAR(64) NOT NULL,
    stage VARCHAR(16) NOT NULL,
    payload JSON NOT NULL,
    seconds FLOAT NOT NULL,
    created FLOAT NOT NULL,
    CONSTRAINT pk_result PRIMARY KEY (result_key)
);
INSERT INTO "result" VALUES('cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc','export','{"value":{"sha256":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}}',1.5,17.0);
CREATE TABLE result_use (
    study INTEGER NOT NULL,
    trial INTEGER NOT NULL,
    result_key VARCHAR(64) NOT NULL,
    first BOOLEAN NOT NULL,
    CONSTRAINT pk_result_use PRIMARY KEY (study, trial, result_key),
    CONSTRAINT fk_result_use_result_key FOREIGN KEY(result_key) REFERENCES result (result_key),
    CONSTRAINT fk_result_use_study_trial FOREIGN KEY(study, trial) REFERENCES trial (study, number) ON DELETE CASCADE,
    CONSTRAINT fk_result_use_study FOREIGN KEY(study) REFERENCES study (id) ON DELETE CASCADE
);
INSERT INTO "result_use" VALUES(1,0,'cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc',1);
CREATE TABLE study (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    name VARCHAR(64) NOT NULL,
    space JSON NOT NULL,
    space_hash VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL,
    desired_state VARCHAR(16) NOT NULL,
    seed BIGINT NOT NULL,
    version VARCHAR(64) NOT NULL,
    created FLOAT NOT NULL,
    scales JSON,
    reference_point JSON,
    proposer JSON,
    CONSTRAINT uq_study_name UNIQUE (name)
);
INSERT INTO "study" VALUES(1,'old','{"name":"tiny"}','bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','paused','pause',7,'0.1.0',15.0,'{"latency":1.0}',NULL,NULL);
CREATE TABLE study_lease (
    study INTEGER NOT NULL,
    holder VARCHAR(255) NOT NULL,
    epoch INTEGER NOT NULL,
    expires FLOAT NOT NULL,
    CONSTRAINT pk_study_lease PRIMARY KEY (study),
    CONSTRAINT fk_study_lease_study FOREIGN KEY(study) REFERENCES study (id) ON DELETE CASCADE
);
INSERT INTO "study_lease" VALUES(1,'host:1:aa',3,45.0);
CREATE TABLE trial (
    study INTEGER NOT NULL,
    number INTEGER NOT NULL,
    layout_id VARCHAR(64) NOT NULL,
    layout JSON NOT NULL,
    origin VARCHAR(16) NOT NULL,
    parents JSON NOT NULL,
    operator VARCHAR(64),
    record JSON,
    created FLOAT NOT NULL,
    state VARCHAR(16) NOT NULL,
    rung INTEGER,
    reason TEXT,
    retryable BOOLEAN NOT NULL,
    updated FLOAT NOT NULL,
    CONSTRAINT pk_trial PRIMARY KEY (study, number),
    CONSTRAINT fk_trial_study FOREIGN KEY(study) REFERENCES study (id) ON DELETE CASCADE,
    CONSTRAINT uq_trial_study_layout_id UNIQUE (study, layout_id)
);
INSERT INTO "trial" VALUES(1,0,'152f4f5c3de667205906ae46a3cc6d1bd426c830bebf948d595e0bb3b792d1c2','{"d_model":64,"layers":[{"ffn":{"kind":"swiglu","width":32},"mixers":[{"kernel":3,"kind":"conv"}]},{"ffn":{"kind":"swiglu","width":32},"mixers":[{"heads":2,"kind":"gqa","kv_heads":1}]}],"v":1,"vocab":256}','reference','[]',NULL,NULL,16.0,'exported',NULL,NULL,0,17.0);
CREATE INDEX ix_artifact_last_used ON artifact (last_used);
CREATE INDEX ix_device_agent ON device (agent);
CREATE INDEX ix_trial_study_state ON trial (study, state);
CREATE INDEX ix_attempt_device_at ON attempt (device, at);
CREATE INDEX ix_attempt_job ON attempt (job);
CREATE INDEX ix_attempt_result_key ON attempt (result_key);
CREATE INDEX ix_attempt_study_trial ON attempt (study, trial);
CREATE INDEX ix_event_study_id ON event (study, id);
CREATE INDEX ix_event_study_trial_id ON event (study, trial, id);
CREATE INDEX ix_job_device_state_priority ON job (device, state, priority);
CREATE INDEX ix_job_state_lease_until ON job (state, lease_until);
CREATE INDEX ix_job_study_trial ON job (study, trial);
CREATE INDEX ix_result_use_result_key ON result_use (result_key);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('study',1);
INSERT INTO "sqlite_sequence" VALUES('event',3);
COMMIT;
