from toolkit.errors import merged

if __name__ == "__main__":
    merged("analysis.publish", "analysis.report inputs=[FOLDER,...] publish=true entity=TEAM")
