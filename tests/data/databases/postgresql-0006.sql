CREATE TABLE agent (
    name character varying(64) NOT NULL,
    secret_hash character varying(64),
    boot_id character varying(128),
    created double precision NOT NULL,
    last_seen double precision
);
CREATE TABLE alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE api_token (
    name character varying(64) NOT NULL,
    token_hash character varying(64) NOT NULL,
    role character varying(16) NOT NULL,
    created double precision NOT NULL,
    last_used double precision
);
CREATE TABLE artifact (
    sha256 character varying(64) NOT NULL,
    size bigint NOT NULL,
    created double precision NOT NULL,
    last_used double precision NOT NULL
);
CREATE TABLE artifact_pin (
    sha256 character varying(64) NOT NULL,
    owner character varying(128) NOT NULL
);
CREATE TABLE attempt (
    id integer NOT NULL,
    kind character varying(32) NOT NULL,
    message text NOT NULL,
    at double precision NOT NULL,
    result_key character varying(64),
    stage character varying(16),
    study integer,
    trial integer,
    job character varying(128),
    device character varying(64),
    payload json
);
CREATE SEQUENCE attempt_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE attempt_id_seq OWNED BY attempt.id;
CREATE TABLE calibration (
    device character varying(64) NOT NULL,
    runtime character varying(64) NOT NULL,
    build character varying(128) NOT NULL,
    reference_ms double precision NOT NULL,
    samples json NOT NULL,
    created double precision NOT NULL
);
CREATE TABLE device (
    id character varying(64) NOT NULL,
    agent character varying(64) NOT NULL,
    device json NOT NULL,
    state character varying(16) NOT NULL,
    health character varying(16) NOT NULL,
    health_reason text,
    checked_at double precision NOT NULL,
    epoch integer NOT NULL,
    lease_holder character varying(64),
    lease_until double precision,
    last_seen double precision NOT NULL,
    state_since double precision NOT NULL,
    health_since double precision NOT NULL,
    check_number integer NOT NULL,
    checks_failed integer NOT NULL,
    check_due double precision
);
CREATE TABLE device_event (
    id integer NOT NULL,
    device character varying(64) NOT NULL,
    at double precision NOT NULL,
    kind character varying(16) NOT NULL,
    what character varying(32) NOT NULL,
    reason text,
    job character varying(128)
);
CREATE SEQUENCE device_event_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE device_event_id_seq OWNED BY device_event.id;
CREATE TABLE enrol_token (
    token_hash character varying(64) NOT NULL,
    expires double precision NOT NULL,
    agent character varying(64)
);
CREATE TABLE event (
    id integer NOT NULL,
    study integer NOT NULL,
    trial integer,
    kind character varying(16) NOT NULL,
    payload json NOT NULL,
    at double precision NOT NULL
);
CREATE SEQUENCE event_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE event_id_seq OWNED BY event.id;
CREATE TABLE identity (
    id integer NOT NULL,
    name character varying(64) NOT NULL
);
CREATE TABLE job (
    id character varying(128) NOT NULL,
    result_key character varying(64) NOT NULL,
    round integer NOT NULL,
    kind character varying(16) NOT NULL,
    study integer,
    trial integer,
    device character varying(64) NOT NULL,
    priority integer NOT NULL,
    payload json NOT NULL,
    state character varying(16) NOT NULL,
    attempts integer NOT NULL,
    epoch integer,
    lease_until double precision,
    not_before double precision NOT NULL,
    created double precision NOT NULL,
    updated double precision NOT NULL,
    result json,
    blame character varying(16),
    reason character varying(32),
    message text,
    phase character varying(16),
    phase_until double precision
);
CREATE TABLE reference_run (
    job character varying(128) NOT NULL,
    device character varying(64) NOT NULL,
    runtime character varying(64) NOT NULL,
    build character varying(128) NOT NULL,
    at double precision NOT NULL,
    calibration_ms double precision NOT NULL,
    runs json NOT NULL
);
CREATE TABLE result (
    result_key character varying(64) NOT NULL,
    stage character varying(16) NOT NULL,
    payload json NOT NULL,
    seconds double precision NOT NULL,
    created double precision NOT NULL
);
CREATE TABLE result_use (
    study integer NOT NULL,
    trial integer NOT NULL,
    result_key character varying(64) NOT NULL,
    first boolean NOT NULL
);
CREATE TABLE study (
    id integer NOT NULL,
    name character varying(64) NOT NULL,
    space json NOT NULL,
    space_hash character varying(64) NOT NULL,
    state character varying(16) NOT NULL,
    desired_state character varying(16) NOT NULL,
    seed bigint NOT NULL,
    version character varying(64) NOT NULL,
    created double precision NOT NULL,
    scales json,
    reference_point json,
    proposer json
);
CREATE SEQUENCE study_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE study_id_seq OWNED BY study.id;
CREATE TABLE study_lease (
    study integer NOT NULL,
    holder character varying(255) NOT NULL,
    epoch integer NOT NULL,
    expires double precision NOT NULL
);
CREATE TABLE trial (
    study integer NOT NULL,
    number integer NOT NULL,
    layout_id character varying(64) NOT NULL,
    layout json NOT NULL,
    origin character varying(16) NOT NULL,
    parents json NOT NULL,
    operator character varying(64),
    record json,
    created double precision NOT NULL,
    state character varying(16) NOT NULL,
    rung integer,
    reason text,
    retryable boolean NOT NULL,
    updated double precision NOT NULL
);
ALTER TABLE ONLY attempt ALTER COLUMN id SET DEFAULT nextval('attempt_id_seq'::regclass);
ALTER TABLE ONLY device_event ALTER COLUMN id SET DEFAULT nextval('device_event_id_seq'::regclass);
ALTER TABLE ONLY event ALTER COLUMN id SET DEFAULT nextval('event_id_seq'::regclass);
ALTER TABLE ONLY study ALTER COLUMN id SET DEFAULT nextval('study_id_seq'::regclass);
INSERT INTO agent VALUES ('local', NULL, 'boot', 10, 20);
INSERT INTO agent VALUES ('elsewhere', 'eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee', NULL, 11, NULL);
INSERT INTO alembic_version VALUES ('0006');
INSERT INTO api_token VALUES ('anna', '9999999999999999999999999999999999999999999999999999999999999999', 'operate', 12, NULL);
INSERT INTO artifact VALUES ('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 5, 13, 14);
INSERT INTO artifact_pin VALUES ('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 'study:1');
INSERT INTO attempt VALUES (1, 'infrastructure', 'cable fell out', 19, '1111111111111111111111111111111111111111111111111111111111111111', 'measure', 1, 0, '1111111111111111111111111111111111111111111111111111111111111111.0', 'box', NULL);
INSERT INTO calibration VALUES ('box', 'fake', 'b1', 10, '{"ms":[10.0]}', 19);
INSERT INTO device VALUES ('box', 'local', '{"cores":2,"cpu":"cpu","id":"box","memory_mb":1024,"model":"Box","os":"Linux","target":"x86_64-linux","transport":"local"}', 'idle', 'good', NULL, 19, 4, NULL, NULL, 20, 19.5, 19.5, 2, 1, NULL);
INSERT INTO device VALUES ('phone', 'local', '{"cores":2,"cpu":"cpu","id":"phone","memory_mb":1024,"model":"Box","os":"Linux","target":"x86_64-linux","transport":"local"}', 'idle', 'unknown', NULL, 19, 4, NULL, NULL, 21, 19.5, 19.5, 2, 1, NULL);
INSERT INTO device VALUES ('old', 'local', '{"cores":2,"cpu":"cpu","id":"old","memory_mb":1024,"model":"Box","os":"Linux","target":"x86_64-linux","transport":"local"}', 'idle', 'bad', NULL, 19, 4, NULL, NULL, 22, 19.5, 19.5, 2, 1, 23);
INSERT INTO device_event VALUES (1, 'old', 19.5, 'health', 'bad', 'it failed', NULL);
INSERT INTO enrol_token VALUES ('ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff', 900, 'elsewhere');
INSERT INTO event VALUES (1, 1, 0, 'proposed', '{}', 16);
INSERT INTO event VALUES (2, 1, 0, 'exported', '{}', 17);
INSERT INTO event VALUES (3, 1, NULL, 'study', '{"state":"paused"}', 18);
INSERT INTO identity VALUES (1, '00000000000000000000000000000000');
INSERT INTO job VALUES ('1111111111111111111111111111111111111111111111111111111111111111.0', '1111111111111111111111111111111111111111111111111111111111111111', 0, 'measure', 1, 0, 'box', 2, '{"candidate":{"affinity":[],"args":[],"deadline_s":1.0,"env":{},"inputs":{},"output_limit":1048576,"runner":{"build":"b1","files":{"run":{"sha256":"dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd","size":1}},"main":"run","patched":false,"runtime":"fake","target":"x86_64-linux"},"threads":1},"cool_down_s":0.0,"reference":null,"repetitions":1,"v":1}', 'queued', 1, 4, NULL, 0, 18, 19, NULL, NULL, NULL, 'cable fell out', 'running', 30);
INSERT INTO reference_run VALUES ('j', 'box', 'fake', 'b1', 19, 10, '[[1.0,null,true]]');
INSERT INTO result VALUES ('cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc', 'export', '{"value":{"sha256":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}}', 1.5, 17);
INSERT INTO result_use VALUES (1, 0, 'cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc', true);
INSERT INTO study VALUES (1, 'old', '{"name":"tiny"}', 'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb', 'paused', 'pause', 7, '0.1.0', 15, '{"latency":1.0}', NULL, NULL);
INSERT INTO study_lease VALUES (1, 'host:1:aa', 3, 45);
INSERT INTO trial VALUES (1, 0, '152f4f5c3de667205906ae46a3cc6d1bd426c830bebf948d595e0bb3b792d1c2', '{"d_model":64,"layers":[{"ffn":{"kind":"swiglu","width":32},"mixers":[{"kernel":3,"kind":"conv"}]},{"ffn":{"kind":"swiglu","width":32},"mixers":[{"heads":2,"kind":"gqa","kv_heads":1}]}],"v":1,"vocab":256}', 'reference', '[]', NULL, NULL, 16, 'exported', NULL, NULL, false, 17);
SELECT pg_catalog.setval('attempt_id_seq', 10, true);
SELECT pg_catalog.setval('device_event_id_seq', 10, true);
SELECT pg_catalog.setval('event_id_seq', 10, true);
SELECT pg_catalog.setval('study_id_seq', 10, true);
ALTER TABLE ONLY alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY agent
    ADD CONSTRAINT pk_agent PRIMARY KEY (name);
ALTER TABLE ONLY api_token
    ADD CONSTRAINT pk_api_token PRIMARY KEY (name);
ALTER TABLE ONLY artifact
    ADD CONSTRAINT pk_artifact PRIMARY KEY (sha256);
ALTER TABLE ONLY artifact_pin
    ADD CONSTRAINT pk_artifact_pin PRIMARY KEY (sha256, owner);
ALTER TABLE ONLY attempt
    ADD CONSTRAINT pk_attempt PRIMARY KEY (id);
ALTER TABLE ONLY calibration
    ADD CONSTRAINT pk_calibration PRIMARY KEY (device, runtime, build);
ALTER TABLE ONLY device
    ADD CONSTRAINT pk_device PRIMARY KEY (id);
ALTER TABLE ONLY device_event
    ADD CONSTRAINT pk_device_event PRIMARY KEY (id);
ALTER TABLE ONLY enrol_token
    ADD CONSTRAINT pk_enrol_token PRIMARY KEY (token_hash);
ALTER TABLE ONLY event
    ADD CONSTRAINT pk_event PRIMARY KEY (id);
ALTER TABLE ONLY identity
    ADD CONSTRAINT pk_identity PRIMARY KEY (id);
ALTER TABLE ONLY job
    ADD CONSTRAINT pk_job PRIMARY KEY (id);
ALTER TABLE ONLY reference_run
    ADD CONSTRAINT pk_reference_run PRIMARY KEY (job);
ALTER TABLE ONLY result
    ADD CONSTRAINT pk_result PRIMARY KEY (result_key);
ALTER TABLE ONLY result_use
    ADD CONSTRAINT pk_result_use PRIMARY KEY (study, trial, result_key);
ALTER TABLE ONLY study
    ADD CONSTRAINT pk_study PRIMARY KEY (id);
ALTER TABLE ONLY study_lease
    ADD CONSTRAINT pk_study_lease PRIMARY KEY (study);
ALTER TABLE ONLY trial
    ADD CONSTRAINT pk_trial PRIMARY KEY (study, number);
ALTER TABLE ONLY job
    ADD CONSTRAINT uq_job_result_key_round UNIQUE (result_key, round);
ALTER TABLE ONLY study
    ADD CONSTRAINT uq_study_name UNIQUE (name);
ALTER TABLE ONLY trial
    ADD CONSTRAINT uq_trial_study_layout_id UNIQUE (study, layout_id);
CREATE INDEX ix_artifact_last_used ON artifact USING btree (last_used);
CREATE INDEX ix_attempt_device_at ON attempt USING btree (device, at);
CREATE INDEX ix_attempt_job ON attempt USING btree (job);
CREATE INDEX ix_attempt_result_key ON attempt USING btree (result_key);
CREATE INDEX ix_attempt_study_trial ON attempt USING btree (study, trial);
CREATE INDEX ix_device_agent ON device USING btree (agent);
CREATE INDEX ix_device_check_due ON device USING btree (check_due);
CREATE INDEX ix_device_event_device_kind_id ON device_event USING btree (device, kind, id);
CREATE INDEX ix_event_study_id ON event USING btree (study, id);
CREATE INDEX ix_event_study_trial_id ON event USING btree (study, trial, id);
CREATE INDEX ix_job_device_state_priority_created_id ON job USING btree (device, state, priority, created, id);
CREATE INDEX ix_job_state_lease_until ON job USING btree (state, lease_until);
CREATE INDEX ix_job_study_trial ON job USING btree (study, trial);
CREATE INDEX ix_reference_run_device_runtime_build_at ON reference_run USING btree (device, runtime, build, at);
CREATE INDEX ix_result_use_result_key ON result_use USING btree (result_key);
CREATE INDEX ix_trial_study_state ON trial USING btree (study, state);
ALTER TABLE ONLY artifact_pin
    ADD CONSTRAINT fk_artifact_pin_sha256 FOREIGN KEY (sha256) REFERENCES artifact(sha256);
ALTER TABLE ONLY attempt
    ADD CONSTRAINT fk_attempt_study FOREIGN KEY (study) REFERENCES study(id) ON DELETE CASCADE;
ALTER TABLE ONLY attempt
    ADD CONSTRAINT fk_attempt_study_trial FOREIGN KEY (study, trial) REFERENCES trial(study, number) ON DELETE CASCADE;
ALTER TABLE ONLY calibration
    ADD CONSTRAINT fk_calibration_device FOREIGN KEY (device) REFERENCES device(id) ON DELETE CASCADE;
ALTER TABLE ONLY device
    ADD CONSTRAINT fk_device_agent FOREIGN KEY (agent) REFERENCES agent(name);
ALTER TABLE ONLY device_event
    ADD CONSTRAINT fk_device_event_device FOREIGN KEY (device) REFERENCES device(id) ON DELETE CASCADE;
ALTER TABLE ONLY event
    ADD CONSTRAINT fk_event_study FOREIGN KEY (study) REFERENCES study(id) ON DELETE CASCADE;
ALTER TABLE ONLY event
    ADD CONSTRAINT fk_event_study_trial FOREIGN KEY (study, trial) REFERENCES trial(study, number) ON DELETE CASCADE;
ALTER TABLE ONLY job
    ADD CONSTRAINT fk_job_device FOREIGN KEY (device) REFERENCES device(id);
ALTER TABLE ONLY job
    ADD CONSTRAINT fk_job_study FOREIGN KEY (study) REFERENCES study(id) ON DELETE CASCADE;
ALTER TABLE ONLY job
    ADD CONSTRAINT fk_job_study_trial FOREIGN KEY (study, trial) REFERENCES trial(study, number) ON DELETE CASCADE;
ALTER TABLE ONLY reference_run
    ADD CONSTRAINT fk_reference_run_device FOREIGN KEY (device) REFERENCES device(id) ON DELETE CASCADE;
ALTER TABLE ONLY result_use
    ADD CONSTRAINT fk_result_use_result_key FOREIGN KEY (result_key) REFERENCES result(result_key);
ALTER TABLE ONLY result_use
    ADD CONSTRAINT fk_result_use_study FOREIGN KEY (study) REFERENCES study(id) ON DELETE CASCADE;
ALTER TABLE ONLY result_use
    ADD CONSTRAINT fk_result_use_study_trial FOREIGN KEY (study, trial) REFERENCES trial(study, number) ON DELETE CASCADE;
ALTER TABLE ONLY study_lease
    ADD CONSTRAINT fk_study_lease_study FOREIGN KEY (study) REFERENCES study(id) ON DELETE CASCADE;
ALTER TABLE ONLY trial
    ADD CONSTRAINT fk_trial_study FOREIGN KEY (study) REFERENCES study(id) ON DELETE CASCADE;
